"""The tracking methods once more, as their papers print them: loops over agents, in NumPy.

They share no code with the package. ``gradient(i, x)`` is agent i's, ``noise[k][name][i]`` what
agent i adds to the variable of that name in round k, ``steps[k]`` the step size. Each returns the
models after every round [T, n, p] and the messages by name.
"""

import numpy as np


def _mixed(weights, values, i):
    return sum(weights[i, j] * values[j] for j in range(len(values)))


def tracking(gradient, weights, start, steps, noise, beta):
    n = len(start)
    x = [*start]
    y = [0 * s for s in start]
    models = []
    sent = []
    for k, alpha in enumerate(steps):
        z = [x[i] + noise[k]["model"][i] for i in range(n)]
        mean = [_mixed(weights, z, i) for i in range(n)]
        y = [y[i] + beta * (z[i] - mean[i]) for i in range(n)]
        x = [mean[i] - alpha * (y[i] + gradient(i, z[i])) for i in range(n)]
        models.append(np.array(x))
        sent.append(np.array(z))
    return np.array(models), {"model": np.array(sent)}


def dpop(gradient, weights, start, steps, noise, box):
    n = len(start)
    x = [*start]
    models = []
    sent = []
    for k, alpha in enumerate(steps):
        y = [x[i] + noise[k]["model"][i] for i in range(n)]
        z = [_mixed(weights, y, i) for i in range(n)]
        x = [np.clip(z[i] - alpha * gradient(i, z[i]), -box, box) for i in range(n)]
        models.append(np.array(x))
        sent.append(np.array(y))
    return np.array(models), {"model": np.array(sent)}


def dgd(gradient, weights, start, steps, noise):
    n = len(start)
    x = [*start]
    models = []
    sent = []
    for k, alpha in enumerate(steps):
        z = [x[i] + noise[k]["model"][i] for i in range(n)]
        x = [_mixed(weights, z, i) - alpha * gradient(i, x[i]) for i in range(n)]
        models.append(np.array(x))
        sent.append(np.array(z))
    return np.array(models), {"model": np.array(sent)}


def pair(gradient, rows, columns, start, steps, noise):
    """Gradient tracking; with noise Diff-TV-AB: both variables are mixed as they were sent."""
    n = len(start)
    x = [*start]
    y = [gradient(i, x[i]) for i in range(n)]
    models = []
    sent = []
    tracked = []
    for k, alpha in enumerate(steps):
        noisy_x = [x[i] + noise[k]["model"][i] for i in range(n)]
        noisy_y = [y[i] + noise[k]["tracker"][i] for i in range(n)]
        new = [_mixed(rows, noisy_x, i) - alpha * y[i] for i in range(n)]
        y = [
            _mixed(columns, noisy_y, i) + gradient(i, new[i]) - gradient(i, x[i]) for i in range(n)
        ]
        x = new
        models.append(np.array(x))
        sent.append(np.array(noisy_x))
        tracked.append(np.array(noisy_y))
    return np.array(models), {"model": np.array(sent), "tracker": np.array(tracked)}


def adapt_then_combine(gradient, weights, start, steps):
    """Gradient tracking whose steps are mixed too: x+ = W (x - alpha y)."""
    n = len(start)
    x = [*start]
    y = [gradient(i, start[i]) for i in range(n)]
    models = []
    for alpha in steps:
        moved = [x[j] - alpha * y[j] for j in range(n)]
        new = [_mixed(weights, moved, i) for i in range(n)]
        y = [_mixed(weights, y, i) + gradient(i, new[i]) - gradient(i, x[i]) for i in range(n)]
        x = new
        models.append(np.array(x))
    return np.array(models), {}


def pp_doagt(gradient, rows, columns, start, steps, noise):
    n = len(start)
    x = [*start]
    s = [0 * item for item in start]
    models = []
    sent = []
    tracked = []
    for k, alpha in enumerate(steps):
        noisy_x = [x[i] + noise[k]["model"][i] for i in range(n)]
        noisy_s = [s[i] + noise[k]["tracker"][i] for i in range(n)]
        new_s = []
        new_x = []
        for i in range(n):
            # An agent's own values enter without their noise.
            heard_s = [s[j] if j == i else noisy_s[j] for j in range(n)]
            heard_x = [x[j] if j == i else noisy_x[j] for j in range(n)]
            new_s.append(_mixed(columns, heard_s, i) + alpha * gradient(i, x[i]))
            new_x.append(_mixed(rows, heard_x, i) - (new_s[i] - s[i]))
        x = new_x
        s = new_s
        models.append(np.array(x))
        sent.append(np.array(noisy_x))
        tracked.append(np.array(noisy_s))
    return np.array(models), {"model": np.array(sent), "tracker": np.array(tracked)}


def extra(gradient, weights, start, steps):
    n = len(start)
    alpha = steps[0]
    eye = np.eye(len(start))
    old = [*start]
    x = [_mixed(weights, old, i) - alpha * gradient(i, old[i]) for i in range(n)]
    models = [np.array(x)]
    for _ in steps[1:]:
        new = [
            _mixed(eye + weights, x, i)
            - _mixed((eye + weights) / 2, old, i)
            - alpha * (gradient(i, x[i]) - gradient(i, old[i]))
            for i in range(n)
        ]
        old = x
        x = new
        models.append(np.array(x))
    return np.array(models), {}


def nids(gradient, weights, start, steps):
    n = len(start)
    alpha = steps[0]
    half = (np.eye(n) + weights) / 2
    old = [*start]
    x = [old[i] - alpha * gradient(i, old[i]) for i in range(n)]
    models = [np.array(x)]
    for _ in steps[1:]:
        ahead = [
            2 * x[j] - old[j] - alpha * gradient(j, x[j]) + alpha * gradient(j, old[j])
            for j in range(n)
        ]
        old = x
        x = [_mixed(half, ahead, i) for i in range(n)]
        models.append(np.array(x))
    return np.array(models), {}

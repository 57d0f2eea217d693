"""A process for each node, NumPy, and TCP on this machine: the usual peer-to-peer script.

Run as ``python _nodes.py TASK ROUNDS SCALE``, where TASK is what `_tasks.save` wrote. Prints, as
JSON, the seconds of all rounds and all models. It imports NumPy alone, so that nodes are light and
their forks inherit no threads.
"""

import json
import multiprocessing
import socket
import sys
import time
from typing import Any

import numpy as np


def gradient(model: np.ndarray, x: np.ndarray, y: np.ndarray, clip_norm: float) -> np.ndarray:
    """Of the mean logistic loss, clipped."""
    slope = (-y / (1 + np.exp(y * (x @ model)))) @ x / len(y)
    return slope * min(1.0, clip_norm / max(float(np.linalg.norm(slope)), 1e-30))


def received(link: socket.socket, size: int) -> np.ndarray:
    """A model from a neighbour."""
    data = bytearray()
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise ConnectionError("a neighbour has left")
        data += part
    return np.frombuffer(data, np.float32)


def connected(i: int, neighbours: list[int], listener: socket.socket, ports: list[int]) -> dict:
    """A link to each neighbour, opened by the one of larger number."""
    links = {}
    for j in neighbours:
        if j < i:
            links[j] = socket.create_connection(("127.0.0.1", ports[j]))
            links[j].sendall(i.to_bytes(4, "big"))
    while len(links) < len(neighbours):
        link = listener.accept()[0]
        links[int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")] = link
    for link in links.values():
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return links


def node(
    i: int, task: Any, rounds: int, scale: float, listeners: list[Any], start: Any, answers: Any
) -> None:
    """One process: all rounds of one agent."""
    weights = task["weights"][i]
    x = task["x"][i]
    y = task["y"][i]
    clip_norm = float(task["clip_norm"])
    step = np.float32(task["step_size"])
    neighbours = [int(j) for j in np.flatnonzero(weights) if j != i]
    ports = [listener.getsockname()[1] for listener in listeners]
    links = connected(i, neighbours, listeners[i], ports)
    random = np.random.default_rng(i)
    model = np.zeros(x.shape[1], np.float32)
    start.wait()
    began = time.monotonic()
    for _ in range(rounds):
        slope = gradient(model, x, y, clip_norm)
        if scale:
            slope += np.float32(scale) * random.standard_normal(model.shape, np.float32)
        message = model - step * slope
        for link in links.values():
            link.sendall(message)
        model = weights[i] * message
        for j, link in links.items():
            model += weights[j] * received(link, message.nbytes)
    answers.put((i, model, began, time.monotonic()))


def network(file: Any, rounds: int, scale: float) -> tuple[float, np.ndarray]:
    """Seconds of all rounds of all nodes, and their models."""
    task = dict(file)
    n = len(task["weights"])
    fork = multiprocessing.get_context("fork")
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=n) for _ in range(n)]
    start = fork.Barrier(n)
    answers = fork.Queue()
    rest = task, rounds, scale, listeners, start, answers
    nodes = [fork.Process(target=node, args=(i, *rest)) for i in range(n)]
    for item in nodes:
        item.start()
    ended = sorted((answers.get(timeout=300) for _ in nodes), key=lambda answer: answer[0])
    for item in nodes:
        item.join()
    began = min(value[2] for value in ended)
    last = max(case[3] for case in ended)
    return last - began, np.stack([each[1] for each in ended])


if __name__ == "__main__":
    seconds, models = network(np.load(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    print(json.dumps([seconds, models.tolist()]))

"""Small real data sets that come with scikit-learn."""

import numpy as np

from dpjax import _validate

__all__ = ["standardise"]

_TEST_SHARE = 0.2
_SEED = 0


def read(name: str) -> dict[str, np.ndarray]:
    """Return a data set of scikit-learn, split and standardised.

    A fifth of each class is for testing, chosen by a fixed seed: the split is the same for
    everybody. Features are centred and scaled by mean and standard deviation of the train records
    alone. These statistics are not private; a real deployment states them or spends budget.

    Args:
        name: "breast_cancer" (30 features, labels -1 malignant and +1 benign) or "digits"
            (64 features, labels 0 to 9).

    Returns:
        ``x_train``, ``y_train``, ``x_test``, ``y_test``; float32 and int32.
    """
    from sklearn import datasets

    x, y = {"breast_cancer": datasets.load_breast_cancer, "digits": datasets.load_digits}[name](
        return_X_y=True
    )
    if name == "breast_cancer":
        y = 2 * y - 1
    rng = np.random.default_rng(_SEED)
    test = np.zeros(len(y), bool)
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        test[rng.choice(rows, round(_TEST_SHARE * len(rows)), replace=False)] = True
    x_train, x_test = standardise(x[~test], x[test])
    return {
        "x_train": x_train.astype(np.float32),
        "y_train": y[~test].astype(np.int32),
        "x_test": x_test.astype(np.float32),
        "y_test": y[test].astype(np.int32),
    }


def standardise(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centre and scale features by the mean and standard deviation of the train records.

    Args:
        train: [N, d] train examples.
        test: [M, d] test examples.

    Returns:
        Both, float64; a feature that is constant in ``train`` is centred only.

    Raises:
        ValueError: For other columns in ``test``, NaN, infinity, or values whose squares overflow.
    """
    train = _validate.finite_array("train", train, ndim=2)
    test = _validate.finite_array("test", test, ndim=2)
    if train.shape[1] != test.shape[1]:
        raise ValueError(
            f"test has {test.shape[1]} columns, train {train.shape[1]}; give both the same"
        )
    for name, part in (("train", train), ("test", test)):
        if (largest := np.abs(part).max()) > 1e150:
            raise ValueError(
                f"{name} reaches {largest:.3g}, whose square overflows; scale or drop that feature"
            )
    mean, deviation = train.mean(0), train.std(0)
    deviation[deviation <= 1e-12 * np.maximum(1.0, np.abs(mean))] = 1.0
    return (train - mean) / deviation, (test - mean) / deviation

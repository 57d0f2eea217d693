"""Federated averaging in Flower's simulation: a `ClientApp`, a `ServerApp`, Ray's processes.

Run as ``python _flower.py TASK ROUNDS SCALE`` by an interpreter that has ``flwr[simulation]`` and
NumPy, where TASK is a file of `_tasks.compared` and SCALE the noise multiplier. Clients take local
steps on all of their records; `DifferentialPrivacyServerSideFixedClipping` clips their updates and
adds noise to the mean. Prints, as JSON, the seconds of all rounds but the first, in which Ray's
actors start, and the models.
"""

import json
import os
import sys
import time
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation

FILE = sys.argv[1]
ROUNDS = int(sys.argv[2])
SCALE = float(sys.argv[3])
client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Local steps on the client's records."""
    task = _task()
    position = int(context.node_config["partition-id"])
    x = task["x"][position]
    y = task["y"][position]
    step = np.float32(task["step_size"])
    model = message.content["arrays"].to_numpy_ndarrays()[0].copy()
    for _ in range(int(task["steps"])):
        model -= step * ((-y / (1 + np.exp(y * (x @ model)))) @ x / len(y))
    content = {"arrays": ArrayRecord([model]), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """All rounds; the result is left in `ANSWER`."""
    task = _task()
    clocks = []
    n = len(task["x"])
    length = float(task["step_size"] * task["steps"])
    plain = FedAvg(fraction_evaluate=0.0, min_train_nodes=n, min_available_nodes=n)
    strategy = DifferentialPrivacyServerSideFixedClipping(
        plain, SCALE, float(task["clip_norm"]) * length, n
    )

    def clocked(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        clocks.append(time.monotonic())
        return None

    start = ArrayRecord([np.zeros(task["x"].shape[-1], np.float32)])
    result = strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=clocked)
    model = result.arrays.to_numpy_ndarrays()[0]
    ANSWER.extend([(clocks[-1] - clocks[1]) * ROUNDS / (ROUNDS - 1), [model.tolist()] * n])


ANSWER: list[Any] = []
_FILES: dict[str, dict[str, np.ndarray]] = {}


def _task() -> dict[str, np.ndarray]:
    """The file, read once in a process."""
    if FILE not in _FILES:
        _FILES[FILE] = dict(np.load(FILE))
    return _FILES[FILE]


if __name__ == "__main__":
    clients = len(_task()["x"])
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, clients, backend_config=resources)
    print(json.dumps(ANSWER))

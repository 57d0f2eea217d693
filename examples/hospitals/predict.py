"""Predict for one record by a site's model and NumPy alone: predict.py FOLDER/lyon/run/model.npz"""

import sys

import numpy as np

# A class is 1 where the record has it, else 0. Of a missing number give the middle of its range,
# and 1 for "creatinine is missing".
RECORD = {"age": 71, "pressure": 140, "creatinine": 1.2, "sex=male": 1, "ward=surgery": 1}


def main(path):
    model = np.load(path)
    x = np.array([RECORD.get(name, 0) for name in model["features"]])
    low, high = model["ranges"].T
    x = (np.clip(x, low, high) - (low + high) / 2) / ((high - low) / 2)
    score = x @ model["['params']['weight']"] + model["['params']['bias']"]
    print(f"{model['label']}: {model['classes'][int(score > 0)]}, score {score:.6f}")


if __name__ == "__main__":
    main(sys.argv[1])

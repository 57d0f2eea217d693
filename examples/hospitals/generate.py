"""Records of three made-up hospitals: python examples/hospitals/generate.py FOLDER

For each hospital it writes a folder with records.csv, in the hospital's own words and dialect, and
data.toml, which says how to read them by schema.toml. Nobody's data are in them. With --sites there
are up to nine, in the words of these three, and with --counts each has so many records.
"""

import argparse
import csv
import tomllib
from pathlib import Path

import numpy as np

HOSPITALS = {
    "lyon": """\
file = "records.csv"
delimiter = ";"
decimal = ","
encoding = "cp1252"
missing_values = ["", "ND"]

[names]
age = "âge"
pressure = "tension systolique"
creatinine = "créatinine"
sex = "sexe"
ward = "service"
readmitted = "réadmis"

[values]
sex = { F = "female", H = "male" }
ward = { "médecine" = "medicine", chirurgie = "surgery", cardiologie = "cardiology" }
readmitted = { non = "no", oui = "yes" }
""",
    "geneva": """\
file = "records.csv"
encoding = "utf-8"
missing_values = ["NA"]

[names]
pressure = "sbp_mmhg"
creatinine = "crea_mg_dl"
readmitted = "readmitted_30d"

[values]
sex = { "1" = "female", "2" = "male" }
ward = { MED = "medicine", SURG = "surgery", CARD = "cardiology" }
readmitted = { "0" = "no", "1" = "yes" }
""",
    "turin": """\
file = "records.csv"
delimiter = "\\t"
decimal = ","
encoding = "latin-1"
missing_values = ["n.d."]

[names]
age = "età"
pressure = "pressione"
creatinine = "creatinina"
sex = "sesso"
ward = "reparto"
readmitted = "riammesso"

[values]
sex = { femmina = "female", maschio = "male" }
ward = { medicina = "medicine", chirurgia = "surgery", cardiologia = "cardiology" }
readmitted = { no = "no", "sì" = "yes" }
""",
}
"""What a hospital's file of settings says of its records."""
COUNTS = {
    "lyon": 420, "geneva": 380, "turin": 400,
    "nantes": 390, "basel": 410, "parma": 370, "dijon": 430, "bern": 360, "siena": 440,
}  # fmt: skip
RATES = {"lyon": -1.5, "geneva": -0.5, "turin": 0.5}
"""Logits of the label at the middle of all ranges: hospitals readmit unequally."""
WARDS = ["medicine", "surgery", "cardiology", "neurology"]


def records(count, logit, rng):
    """Columns of one hospital, in the schema's words."""
    age = np.clip(rng.normal(62, 17, count), 18, 104).round()
    pressure = np.clip(rng.normal(128, 20, count) + 0.2 * (age - 62), 75, 215).round()
    creatinine = (0.9 * np.exp(rng.normal(0, 0.5, count))).round(2)
    sex = rng.choice(["female", "male"], count)
    ward = rng.choice(WARDS, count, p=[0.45, 0.25, 0.2, 0.1])
    logits = logit + 0.06 * (age - 62) + 0.02 * (pressure - 128) + 1.5 * (creatinine - 0.9)
    logits = logits + (ward == "cardiology") - 0.5 * (sex == "female")
    readmitted = np.where(rng.random(count) < 1 / (1 + np.exp(-logits)), "yes", "no")
    creatinine = np.where(rng.random(count) < 0.1, np.nan, creatinine)
    return {
        "age": age.astype(int), "pressure": pressure.astype(int), "creatinine": creatinine,
        "sex": sex, "ward": ward, "readmitted": readmitted,
    }  # fmt: skip


def written(value, words, dialect):
    """A value as the hospital writes it."""
    if isinstance(value, str):
        return words.get(value, value)
    if np.isnan(value):
        return dialect["missing_values"][-1]
    return str(value).replace(".", dialect.get("decimal", "."))


def main(folder, counts=None, seed=40):
    counts = counts or list(COUNTS.values())[:3]
    for number, (name, count) in enumerate(zip(COUNTS, counts, strict=False)):
        # Whose words and rates it has.
        country = list(HOSPITALS)[number % 3]
        text = HOSPITALS[country]
        place = Path(folder) / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "data.toml").write_text(text, encoding="utf-8")
        dialect = tomllib.loads(text)
        columns = records(count, RATES[country], np.random.default_rng([seed, number]))
        table = [["id", *(dialect["names"].get(column, column) for column in columns)]]
        # The hospital's word for the schema's.
        words = {
            column: {meaning: word for word, meaning in dialect["values"].get(column, {}).items()}
            for column in columns
        }
        for row, values in enumerate(zip(*columns.values(), strict=True), 1):
            cells = zip(columns, values, strict=True)
            table.append(
                [row, *(written(value, words[column], dialect) for column, value in cells)]
            )
        # One of them writes as spreadsheets on Windows do.
        quoting = csv.QUOTE_ALL if country == "geneva" else csv.QUOTE_MINIMAL
        encoding = "utf-8-sig" if country == "geneva" else dialect["encoding"]
        with open(place / dialect["file"], "w", encoding=encoding, newline="") as file:
            delimiter = dialect.get("delimiter", ",")
            csv.writer(file, delimiter=delimiter, quoting=quoting).writerows(table)
        print(f"written: {place / dialect['file']}, {count} records")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sites", type=int, default=3, help="3 to 9")
    parser.add_argument("--counts", type=int, nargs="+", help="records of each site")
    parser.add_argument("--seed", type=int, default=40)
    arguments = parser.parse_args()
    usual = list(COUNTS.values())[: arguments.sites]
    main(arguments.folder, arguments.counts or usual, arguments.seed)

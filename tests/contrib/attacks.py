"""What outsiders and neighbours can read from ciphertexts that were made wrong."""

import math

import numpy as np


def read(ciphertext, modulus):
    """The whole number of a ciphertext without obfuscator, (1 + n)^m; None if it has one."""
    if ciphertext % modulus != 1:
        return None
    total = ciphertext % modulus**2 // modulus
    return total - modulus if total > modulus // 2 else total


def difference(value, other, modulus):
    """The difference of two whole numbers whose ciphertexts share their obfuscator, or None."""
    return read(value * pow(other, -1, modulus**2) % modulus**2, modulus)


def logarithm(base, power, modulus, bits):
    """The exponent below 2^bits, by small and large steps; None where there is none."""
    small = 1 << (bits + 1) // 2
    table = {}
    value = 1
    for exponent in range(small):
        table.setdefault(value, exponent)
        value = value * base % modulus
    jump = pow(base, -small, modulus)
    value = power
    for high in range(small + 1):
        if value in table:
            return high * small + table[value]
        value = value * jump % modulus
    return None


def squares(ciphertexts, prime):
    """Which of them are squares modulo a prime of the asker's."""
    return [pow(ciphertext, (prime - 1) // 2, prime) == 1 for ciphertext in ciphertexts]


def divisor(answers):
    """The greatest common divisor of decrypted answers."""
    return math.gcd(*answers)


def consistent(answers, grain, bits, width):
    """Which B from 1 to 2^bits could lead to answers B grain m + e, |e| <= width, m whole."""
    weights = np.arange(1, 2**bits + 1, dtype=np.int64)
    fits = np.ones(len(weights), bool)
    for answer in answers:
        steps = weights * grain
        off = answer % steps
        fits &= np.minimum(off, steps - off) <= width
    return weights[fits]

"""The coded ring as its definition says, slowly: for any code, with rounding at each hop."""

import numpy as np


def outputs(code, gradients, dtype, rounded=lambda token: token):
    """(N, c, n) array: what each rank solves for, from (N, c, n) gradients.

    Tokens are kept in the dtype, and rounded further by a function.
    """
    size, rounds = code.size, code.rounds
    exact = np.result_type(code.nodes, np.float64)
    kept = np.complex64 if exact == np.complex128 and dtype == np.float32 else dtype
    if exact == np.complex128 and dtype == np.float64:
        kept = np.complex128
    tokens = np.zeros((size, gradients.shape[2]), kept)
    equations = [[] for _ in range(size)]
    for hop in range(rounds + 1):
        for token in range(size):
            rank = (token + hop) % size
            weights = code.row(token, hop)
            if hop >= size:
                weights = weights - code.row(token, hop - size)
            update = (weights.astype(exact) @ gradients[rank]).astype(kept)
            tokens[token] = rounded(tokens[token] + update)
            if hop >= size - 1:
                equations[rank].append(tokens[token].copy())
    return np.array([np.linalg.solve(code.system(r), np.array(equations[r])) for r in range(size)])


def worst_error(found, gradients):
    """Largest relative 2-norm error of a rank."""
    right = gradients.sum(axis=0)
    return max(np.linalg.norm(out - right) for out in found) / np.linalg.norm(right)

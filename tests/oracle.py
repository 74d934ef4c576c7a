"""The wire format and the codecs once more, in plain NumPy: what the kernels are judged by.

Written from the format's description, with no code in common with the package: one block at a
time, the simplest expression that defines each result, and every intermediate in the data's own
precision, so that results must agree to the bit.
"""

import numpy as np

NEAREST, STOCHASTIC, LEVELS, TERNARY = range(4)
MASK = (1 << 64) - 1


def draws(key, index, count):
    """Random numbers, odd and below 2^17, of values index ... index + count - 1."""
    out = np.empty(count, np.uint32)
    lane = np.arange(32, dtype=np.uint32)
    for start in range(0, count, 64):
        z = (key + ((index + start) // 64 + 1) * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        a, b = np.uint32(z & 0xFFFFFFFF), np.uint32(z >> 32)
        with np.errstate(over="ignore"):
            h = a + lane * np.uint32(0x9E3779B9)
            h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
            h ^= b
            h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
            h ^= h >> np.uint32(16)
        both = 2 * np.concatenate([h & np.uint32(0xFFFF), h >> np.uint32(16)]) + 1
        out[start : start + 64] = both[: min(64, count - start)]
    return out


def partial_sums(values):
    """The sum by 64 partial sums (index mod 64) and the tree 32, 16, 8, 4, 2, 1."""
    sums = np.zeros(64, values.dtype)
    for start in range(0, len(values), 64):
        part = values[start : start + 64]
        sums[: len(part)] += part
    half = 32
    while half:
        sums[:half] += sums[half : 2 * half]
        half //= 2
    return sums[0]


def uniform_block(x, bits, random):
    """(scale, codes) with scale = absmax / L."""
    real = x.dtype.type
    info = np.finfo(x.dtype)
    limit = real(2 ** (bits - 1) - 1)
    absmax = np.max(np.abs(x))
    if not np.isfinite(absmax):
        return real(np.nan), np.zeros(len(x), np.int64)
    scale = absmax / limit
    if scale < info.tiny and scale * limit < absmax:
        scale += info.smallest_subnormal
    with np.errstate(over="ignore"):
        if not np.isfinite(scale * limit):
            scale = np.nextafter(scale, real(0))
    if scale == 0:
        return scale, np.zeros(len(x), np.int64)
    lift = real(1)
    if scale < info.tiny:
        lift = real(2.0 ** (64 if info.bits == 32 else 128))
    y = (x * lift) * (real(1) / (scale * lift))
    if random is None:
        return scale, np.rint(y).astype(np.int64)
    y = np.clip(y, -limit, limit)
    floor = np.floor(y)
    up = random.astype(x.dtype) < (y - floor) * real(131072)
    return scale, floor.astype(np.int64) + up


def levels_block(x, kind, bits):
    """(scale, codes) with the least-squares scale; codes are the signed levels."""
    real = x.dtype.type
    magnitude = np.abs(x)
    sign = np.where(np.signbit(x), -1, 1)
    if not np.all(np.isfinite(x)):
        base = 1 if kind == LEVELS else 0
        return real(np.nan), np.full(len(x), base, np.int64)
    if np.all(magnitude == magnitude[0]):
        high = np.full(len(x), kind == TERNARY and magnitude[0] > 0)
        return magnitude[0], sign * (high if kind == TERNARY else 1)
    lift = real(1)
    with np.errstate(over="ignore"):
        total = partial_sums(magnitude)
    if not np.isfinite(total):
        lift = real(2.0**-64)
        total = partial_sums(magnitude * lift)
    mean = total / real(len(x)) / lift
    if bits == 1:
        return mean, sign
    high = magnitude > real(0.7 if kind == TERNARY else 1.23) * mean
    above = partial_sums(np.where(high, magnitude * lift, real(0)))
    count = int(high.sum())
    if kind == TERNARY:
        return (above / real(count) / lift if count else real(0)), sign * high
    scale = (total + real(2) * above) / real(len(x) + 8 * count) / lift
    return min(scale, np.finfo(x.dtype).max / real(3)), sign * (1 + 2 * high)


def encode(x, kind, bits, block, key=0, index=0):
    """(wire bytes, scales, codes) of one segment."""
    scales, codes = [], []
    random = draws(key, index, len(x)) if kind == STOCHASTIC else None
    for start in range(0, len(x), block):
        part = x[start : start + block]
        if kind in (LEVELS, TERNARY):
            scale, code = levels_block(part, kind, bits)
        else:
            draw = None if random is None else random[start : start + block]
            scale, code = uniform_block(part, bits, draw)
        scales.append(scale)
        codes.append(code)
    scales = np.array(scales, x.dtype)
    codes = np.concatenate(codes) if codes else np.zeros(0, np.int64)
    planes = [codes < 0]
    magnitude = np.abs(codes) >> (kind == LEVELS)
    for bit in range(bits - 2, -1, -1):
        planes.append((magnitude >> bit) & 1)
    packed = [np.packbits(np.asarray(p, np.uint8), bitorder="little") for p in planes]
    return np.concatenate([scales.view(np.uint8), *packed]), scales, codes


def decode(wire, count, kind, bits, block, dtype):
    """Values of one segment."""
    dtype = np.dtype(dtype)
    blocks = -(-count // block)
    scales = wire[: blocks * dtype.itemsize].copy().view(dtype)
    stride = -(-count // 8)
    planes = wire[blocks * dtype.itemsize :].reshape(bits, stride)
    unpacked = [np.unpackbits(p, bitorder="little")[:count].astype(np.int64) for p in planes]
    magnitude = np.full(count, int(kind == LEVELS), np.int64)
    for i, plane in enumerate(unpacked[1:]):
        magnitude += plane << (bits - 2 - i + (kind == LEVELS))
    codes = np.where(unpacked[0] == 1, -magnitude, magnitude)
    return codes.astype(dtype) * np.repeat(scales, block)[:count]

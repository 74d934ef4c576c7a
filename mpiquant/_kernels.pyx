# cython: language_level=3, boundscheck=False, wraparound=False
"""Checked, GIL-free access to the C kernels; the only compiled module of the package.

Arrays are any contiguous buffers of float32 or float64 values, wires any contiguous buffers of
bytes.  All functions return True if a block with a non-finite value was met.
"""
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t, uint8_t

import os

cdef extern from "mpq.h" nogil:
    enum:
        MPQ_NEAREST
        MPQ_STOCHASTIC
        MPQ_LEVELS
        MPQ_TERNARY
        MPQ_BLOCK_MAX
        MPQ_BITS_MAX
        MPQ_GROUP
        MPQ_MIX_MAX

    ctypedef struct mpq_format:
        int32_t kind
        int32_t bits
        int64_t block

    ctypedef struct mpq_stream:
        uint64_t key
        int64_t index

    ctypedef struct mpq_kernels:
        const char *name
        int (*encode_f32)(
            const float *, int64_t, uint8_t *, const mpq_format *, mpq_stream, float *
        ) noexcept nogil
        int (*encode_f64)(
            const double *, int64_t, uint8_t *, const mpq_format *, mpq_stream, double *
        ) noexcept nogil
        int (*decode_f32)(
            const uint8_t *, int64_t, const mpq_format *, float *
        ) noexcept nogil
        int (*decode_f64)(
            const uint8_t *, int64_t, const mpq_format *, double *
        ) noexcept nogil
        int (*decode_add_f32)(
            const uint8_t *, int64_t, const mpq_format *, const float *, float *
        ) noexcept nogil
        int (*decode_add_f64)(
            const uint8_t *, int64_t, const mpq_format *, const double *, double *
        ) noexcept nogil
        int (*hop_f32)(
            const uint8_t *, const mpq_format *, const float *, int64_t, uint8_t *,
            const mpq_format *, mpq_stream, float *
        ) noexcept nogil
        int (*hop_f64)(
            const uint8_t *, const mpq_format *, const double *, int64_t, uint8_t *,
            const mpq_format *, mpq_stream, double *
        ) noexcept nogil
        int (*to_half_f32)(
            const float *, int64_t, uint16_t *, float *
        ) noexcept nogil
        int (*to_half_f64)(
            const double *, int64_t, uint16_t *, double *
        ) noexcept nogil
        int (*from_half_f32)(
            const uint16_t *, int64_t, const float *, float *
        ) noexcept nogil
        int (*from_half_f64)(
            const uint16_t *, int64_t, const double *, double *
        ) noexcept nogil
        int (*to_bfloat_f32)(
            const float *, int64_t, uint16_t *, float *
        ) noexcept nogil
        int (*to_bfloat_f64)(
            const double *, int64_t, uint16_t *, double *
        ) noexcept nogil
        int (*from_bfloat_f32)(
            const uint16_t *, int64_t, const float *, float *
        ) noexcept nogil
        int (*from_bfloat_f64)(
            const uint16_t *, int64_t, const double *, double *
        ) noexcept nogil
        int (*mix_f32)(
            const float *const *, int, float *const *, int, const double *, int64_t
        ) noexcept nogil
        int (*mix_f64)(
            const double *const *, int, double *const *, int, const double *, int64_t
        ) noexcept nogil
        int (*add_f32)(
            const float *, int64_t, float *
        ) noexcept nogil
        int (*add_f64)(
            const double *, int64_t, double *
        ) noexcept nogil
        double (*to_integers_f32)(
            const float *, int64_t, double, int32_t *, float *
        ) noexcept nogil
        double (*to_integers_f64)(
            const double *, int64_t, double, int64_t *, double *
        ) noexcept nogil
        int (*from_integers_f32)(
            const int32_t *, int64_t, double, float *
        ) noexcept nogil
        int (*from_integers_f64)(
            const int64_t *, int64_t, double, double *
        ) noexcept nogil
        int64_t (*pack_integers_f32)(
            const uint8_t *, int64_t, const int32_t *, int64_t, uint8_t *
        ) noexcept nogil
        int64_t (*pack_integers_f64)(
            const uint8_t *, int64_t, const int64_t *, int64_t, uint8_t *
        ) noexcept nogil
        int (*unpack_integers_f32)(
            const uint8_t *, int64_t, int64_t, const int32_t *, int32_t *
        ) noexcept nogil
        int (*unpack_integers_f64)(
            const uint8_t *, int64_t, int64_t, const int64_t *, int64_t *
        ) noexcept nogil

    const mpq_kernels *mpq_find_kernels(const char *name)
    int64_t mpq_segment_nbytes(int64_t n, const mpq_format *format, int64_t scale_nbytes)
    int64_t mpq_integers_nbytes(int64_t n, int64_t itemsize)

NEAREST = MPQ_NEAREST
STOCHASTIC = MPQ_STOCHASTIC
LEVELS = MPQ_LEVELS
TERNARY = MPQ_TERNARY
BLOCK_MAX = MPQ_BLOCK_MAX
BITS_MAX = MPQ_BITS_MAX
GROUP = MPQ_GROUP
MIX_MAX = MPQ_MIX_MAX
ISAS = ("avx512", "avx2", "baseline")

cdef const mpq_kernels *kernels = NULL


def use_isa(str name):
    """Choose the instruction set: "auto", "avx512", "avx2" or "baseline".

    Raises
    ------
    ValueError
        If the name is unknown, or this CPU does not have the instruction set.
    """
    global kernels
    if name != "auto" and name not in ISAS:
        raise ValueError(f"unknown instruction set {name!r}: use one of auto, {', '.join(ISAS)}")
    cdef const mpq_kernels *found = mpq_find_kernels(name.encode())
    if found == NULL:
        raise ValueError(f"this CPU does not have {name!r}; it has {', '.join(available_isas())}")
    kernels = found


def isa():
    """Name of the instruction set in use."""
    return kernels.name.decode()


def available_isas():
    """Names of the instruction sets of this CPU, the best first."""
    return tuple(name for name in ISAS if mpq_find_kernels(name.encode()) != NULL)


cdef class _Buffer:
    """One contiguous buffer, released with the object."""
    cdef Py_buffer view
    cdef bint held
    cdef char kind  # b"f", b"d", or b"B" for bytes

    def __cinit__(self):
        self.held = False

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef _Buffer _bytes(object source, bint writable, int64_t nbytes, str what):
    cdef _Buffer b = _Buffer()
    PyObject_GetBuffer(source, &b.view, PyBUF_ANY_CONTIGUOUS | (PyBUF_WRITABLE if writable else 0))
    b.held = True
    if b.view.len != nbytes:
        raise ValueError(f"{what} has {b.view.len} bytes, expected {nbytes}")
    return b


cdef _Buffer _reals(object source, bint writable, str what):
    cdef _Buffer b = _Buffer()
    cdef int flags = PyBUF_ANY_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0)
    PyObject_GetBuffer(source, &b.view, flags)
    b.held = True
    cdef const char *form = b.view.format
    if form != NULL and (form[0] == c"=" or form[0] == c"<" or form[0] == c"@"):
        form += 1  # the machine is little-endian, so all three mean native order
    if form == NULL or (form[0] != c"f" and form[0] != c"d") or form[1] != 0:
        shown = "bytes" if form == NULL else (<bytes> form).decode()
        raise TypeError(f"{what} has items of format {shown!r}, expected float32 or float64")
    b.kind = form[0]
    return b


cdef _Buffer _like(object source, _Buffer first, bint writable, str what):
    cdef _Buffer b = _reals(source, writable, what)
    if b.kind != first.kind:
        raise TypeError(f"{what} has items of format {chr(b.kind)!r}, expected {chr(first.kind)!r}")
    if b.view.len != first.view.len:
        raise ValueError(f"{what} has {b.view.len} bytes, expected {first.view.len}")
    return b


cdef _Buffer _integers(object source, bint writable, str what):
    cdef _Buffer b = _Buffer()
    cdef int flags = PyBUF_ANY_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0)
    PyObject_GetBuffer(source, &b.view, flags)
    b.held = True
    # The machine is little-endian, so all three prefixes mean native order.
    cdef bytes form = b"B" if b.view.format == NULL else (<bytes> b.view.format).lstrip(b"@=<")
    if form not in (b"i", b"l", b"q") or b.view.itemsize not in (4, 8):
        raise TypeError(f"{what} has items of format {form.decode()!r}, expected int32 or int64")
    return b


cdef _Buffer _as_long(object source, _Buffer first, bint writable, str what):
    """Integers, as many and as wide as the items of another buffer."""
    cdef _Buffer b = _integers(source, writable, what)
    if b.view.itemsize != first.view.itemsize or b.view.len != first.view.len:
        raise ValueError(f"{what} has {b.view.len} bytes, {b.view.itemsize} in each item, expected "
                         f"{first.view.len} and {first.view.itemsize}")
    return b


cdef mpq_format _format(int kind, int bits, int64_t block) except *:
    cdef mpq_format f
    cdef int lowest = 1 if kind == MPQ_LEVELS else 2
    cdef int highest = 2 if kind in (MPQ_LEVELS, MPQ_TERNARY) else MPQ_BITS_MAX
    if kind < MPQ_NEAREST or kind > MPQ_TERNARY:
        raise ValueError(f"unknown kind {kind}")
    if bits < lowest or bits > highest:
        raise ValueError(f"bits is {bits}, expected {lowest} to {highest}")
    if block < 1 or block > MPQ_BLOCK_MAX:
        raise ValueError(f"block is {block}, expected 1 to {MPQ_BLOCK_MAX}")
    f.kind = kind
    f.bits = bits
    f.block = block
    return f


cdef mpq_stream _stream(uint64_t key, int64_t index) except *:
    cdef mpq_stream s
    if index < 0 or index % MPQ_GROUP != 0:
        raise ValueError(f"index is {index}, expected a multiple of {MPQ_GROUP}")
    s.key = key
    s.index = index
    return s


def segment_nbytes(int64_t count, int kind, int bits, int64_t block, int itemsize):
    """Bytes on the wire of a segment of count values of itemsize bytes."""
    cdef mpq_format f = _format(kind, bits, block)
    if count < 0:
        raise ValueError(f"count is {count}, expected 0 or more")
    return mpq_segment_nbytes(count, &f, itemsize)


cdef inline int64_t _count(_Buffer b):
    return b.view.len // b.view.itemsize


def encode(x, wire, int kind, int bits, int64_t block, uint64_t key=0, int64_t index=0,
           residual=None):
    """Encode x into wire; residual, if given, gets x minus what wire decodes to."""
    cdef mpq_format f = _format(kind, bits, block)
    cdef mpq_stream s = _stream(key, index)
    cdef _Buffer bx = _reals(x, False, "x")
    cdef _Buffer br = None if residual is None else _like(residual, bx, True, "residual")
    cdef int64_t n = _count(bx)
    cdef _Buffer bw = _bytes(wire, True, mpq_segment_nbytes(n, &f, bx.view.itemsize), "wire")
    cdef void *r = NULL if br is None else br.view.buf
    cdef int flags
    with nogil:
        if bx.kind == c"f":
            flags = kernels.encode_f32(<const float *> bx.view.buf, n, <uint8_t *> bw.view.buf, &f,
                                       s, <float *> r)
        else:
            flags = kernels.encode_f64(<const double *> bx.view.buf, n, <uint8_t *> bw.view.buf, &f,
                                       s, <double *> r)
    return flags != 0


def decode(wire, out, int kind, int bits, int64_t block, addend=None):
    """out = decoded values, plus addend if given (it may be out itself)."""
    cdef mpq_format f = _format(kind, bits, block)
    cdef _Buffer bo = _reals(out, True, "out")
    cdef _Buffer ba = None if addend is None else _like(addend, bo, False, "addend")
    cdef int64_t n = _count(bo)
    cdef _Buffer bw = _bytes(wire, False, mpq_segment_nbytes(n, &f, bo.view.itemsize), "wire")
    cdef const uint8_t *w = <const uint8_t *> bw.view.buf
    cdef const void *a = NULL if ba is None else ba.view.buf
    cdef int flags
    with nogil:
        if bo.kind == c"f":
            if a == NULL:
                flags = kernels.decode_f32(w, n, &f, <float *> bo.view.buf)
            else:
                flags = kernels.decode_add_f32(w, n, &f, <const float *> a, <float *> bo.view.buf)
        elif a == NULL:
            flags = kernels.decode_f64(w, n, &f, <double *> bo.view.buf)
        else:
            flags = kernels.decode_add_f64(w, n, &f, <const double *> a, <double *> bo.view.buf)
    return flags != 0


def hop(wire_in, int bits_in, x, wire, int kind, int bits, int64_t block, uint64_t key=0,
        int64_t index=0, residual=None):
    """Fused wire = encode(x + decode(wire_in)); both wires have the same kind and block."""
    cdef mpq_format fi = _format(kind, bits_in, block)
    cdef mpq_format f = _format(kind, bits, block)
    cdef mpq_stream s = _stream(key, index)
    cdef _Buffer bx = _reals(x, False, "x")
    cdef _Buffer br = None if residual is None else _like(residual, bx, True, "residual")
    cdef int64_t n = _count(bx)
    cdef int64_t size = bx.view.itemsize
    cdef _Buffer bi = _bytes(wire_in, False, mpq_segment_nbytes(n, &fi, size), "wire_in")
    cdef _Buffer bw = _bytes(wire, True, mpq_segment_nbytes(n, &f, size), "wire")
    cdef void *r = NULL if br is None else br.view.buf
    cdef const uint8_t *wi = <const uint8_t *> bi.view.buf
    cdef uint8_t *w = <uint8_t *> bw.view.buf
    cdef int flags
    with nogil:
        if bx.kind == c"f":
            flags = kernels.hop_f32(wi, &fi, <const float *> bx.view.buf, n, w, &f, s, <float *> r)
        else:
            flags = kernels.hop_f64(wi, &fi, <const double *> bx.view.buf, n, w, &f, s,
                                    <double *> r)
    return flags != 0


def cast_encode(x, wire, bint bfloat, residual=None):
    """Cast x to float16 or bfloat16; residual, if given, gets x minus the result."""
    cdef _Buffer bx = _reals(x, False, "x")
    cdef _Buffer br = None if residual is None else _like(residual, bx, True, "residual")
    cdef int64_t n = _count(bx)
    cdef _Buffer bw = _bytes(wire, True, 2 * n, "wire")
    cdef uint16_t *w = <uint16_t *> bw.view.buf
    cdef void *r = NULL if br is None else br.view.buf
    cdef const float *xf = <const float *> bx.view.buf
    cdef const double *xd = <const double *> bx.view.buf
    with nogil:
        if bx.kind == c"f":
            if bfloat:
                kernels.to_bfloat_f32(xf, n, w, <float *> r)
            else:
                kernels.to_half_f32(xf, n, w, <float *> r)
        elif bfloat:
            kernels.to_bfloat_f64(xd, n, w, <double *> r)
        else:
            kernels.to_half_f64(xd, n, w, <double *> r)


def cast_decode(wire, out, bint bfloat, addend=None):
    """out = float16 or bfloat16 values widened, plus addend if given."""
    cdef _Buffer bo = _reals(out, True, "out")
    cdef _Buffer ba = None if addend is None else _like(addend, bo, False, "addend")
    cdef int64_t n = _count(bo)
    cdef _Buffer bw = _bytes(wire, False, 2 * n, "wire")
    cdef const uint16_t *w = <const uint16_t *> bw.view.buf
    cdef const void *a = NULL if ba is None else ba.view.buf
    cdef int flags
    with nogil:
        if bo.kind == c"f":
            if bfloat:
                flags = kernels.from_bfloat_f32(w, n, <const float *> a, <float *> bo.view.buf)
            else:
                flags = kernels.from_half_f32(w, n, <const float *> a, <float *> bo.view.buf)
        elif bfloat:
            flags = kernels.from_bfloat_f64(w, n, <const double *> a, <double *> bo.view.buf)
        else:
            flags = kernels.from_half_f64(w, n, <const double *> a, <double *> bo.view.buf)
    return flags != 0


def mix(matrix, sources, outs):
    """outs[p] = sum over q of matrix[p, q] * sources[q], in doubles.

    The matrix has float64 items, row by row.  All blocks have one length; an output may be one of
    the sources.
    """
    cdef int rows = len(outs), columns = len(sources), k
    if not (1 <= columns <= MPQ_MIX_MAX and 1 <= rows <= columns + 1):
        raise ValueError(f"{columns} blocks cannot be mixed to {rows}")
    cdef _Buffer bm = _reals(matrix, False, "matrix")
    if bm.kind != c"d" or _count(bm) != rows * columns:
        raise ValueError(f"the matrix is not one of {rows} x {columns} float64 items")
    cdef void *ins[MPQ_MIX_MAX]
    cdef void *results[MPQ_MIX_MAX + 1]
    cdef _Buffer first = _reals(sources[0], False, "sources[0]")
    cdef _Buffer b
    held = []
    for k in range(columns):
        b = _like(sources[k], first, False, f"sources[{k}]")
        held.append(b)
        ins[k] = b.view.buf
    for k in range(rows):
        b = _like(outs[k], first, True, f"outs[{k}]")
        held.append(b)
        results[k] = b.view.buf
    cdef int64_t n = _count(first)
    cdef const double *m = <const double *> bm.view.buf
    with nogil:
        if first.kind == c"f":
            kernels.mix_f32(<const float *const *> ins, columns, <float *const *> results, rows, m,
                            n)
        else:
            kernels.mix_f64(<const double *const *> ins, columns, <double *const *> results, rows,
                            m, n)


def add(wire, x):
    """x += the values on a wire, as many as x has."""
    cdef _Buffer bx = _reals(x, True, "x")
    cdef int64_t n = _count(bx)
    cdef _Buffer bw = _bytes(wire, False, bx.view.len, "wire")
    with nogil:
        if bx.kind == c"f":
            kernels.add_f32(<const float *> bw.view.buf, n, <float *> bx.view.buf)
        else:
            kernels.add_f64(<const double *> bw.view.buf, n, <double *> bx.view.buf)


def to_integers(x, double step, q, residual=None):
    """q = x / step, to the nearest; the largest |x - q step|.

    The quotients must be below 2^31 for float32, 2^51 for float64.  q has int32 for float32, int64
    for float64; it may be the memory of x, and so may residual, which gets x - q step.
    """
    cdef _Buffer bx = _reals(x, False, "x")
    cdef _Buffer bq = _as_long(q, bx, True, "q")
    cdef _Buffer br = None if residual is None else _like(residual, bx, True, "residual")
    cdef int64_t n = _count(bx)
    cdef void *r = NULL if br is None else br.view.buf
    cdef double largest
    with nogil:
        if bx.kind == c"f":
            largest = kernels.to_integers_f32(<const float *> bx.view.buf, n, step,
                                              <int32_t *> bq.view.buf, <float *> r)
        else:
            largest = kernels.to_integers_f64(<const double *> bx.view.buf, n, step,
                                              <int64_t *> bq.view.buf, <double *> r)
    return largest


def from_integers(q, double step, out):
    """out = q step; out may be the memory of q."""
    cdef _Buffer bo = _reals(out, True, "out")
    cdef _Buffer bq = _as_long(q, bo, False, "q")
    cdef int64_t n = _count(bo)
    with nogil:
        if bo.kind == c"f":
            kernels.from_integers_f32(<const int32_t *> bq.view.buf, n, step, <float *> bo.view.buf)
        else:
            kernels.from_integers_f64(<const int64_t *> bq.view.buf, n, step,
                                      <double *> bo.view.buf)


def integers_nbytes(int64_t count, int itemsize):
    """Bytes of the longest message of count integers."""
    if count < 0:
        raise ValueError(f"count is {count}, expected 0 or more")
    return mpq_integers_nbytes(count, itemsize)


def pack_integers(q, wire, wire_in=None):
    """Write q, plus the integers of a message, to the beginning of wire; the bytes that it took."""
    cdef _Buffer bq = _integers(q, False, "q")
    cdef int64_t n = _count(bq), took, came = 0
    cdef _Buffer bi = _Buffer()
    cdef const uint8_t *from_ = NULL
    if wire_in is not None:
        PyObject_GetBuffer(wire_in, &bi.view, PyBUF_ANY_CONTIGUOUS)
        bi.held = True
        from_, came = <const uint8_t *> bi.view.buf, bi.view.len
    cdef _Buffer bw = _bytes(wire, True, mpq_integers_nbytes(n, bq.view.itemsize), "wire")
    cdef uint8_t *w = <uint8_t *> bw.view.buf
    with nogil:
        if bq.view.itemsize == 4:
            took = kernels.pack_integers_f32(from_, came, <const int32_t *> bq.view.buf, n, w)
        else:
            took = kernels.pack_integers_f64(from_, came, <const int64_t *> bq.view.buf, n, w)
    if took < 0:
        raise ValueError(f"{came} bytes are no message of {n} integers")
    return took


def unpack_integers(wire, out, addend=None):
    """out = (addend +) the integers of a message, which has just these bytes."""
    cdef _Buffer bo = _integers(out, True, "out")
    cdef _Buffer ba = None if addend is None else _as_long(addend, bo, False, "addend")
    cdef int64_t n = _count(bo)
    cdef _Buffer bw = _Buffer()
    PyObject_GetBuffer(wire, &bw.view, PyBUF_ANY_CONTIGUOUS)
    bw.held = True
    cdef const void *a = NULL if ba is None else ba.view.buf
    cdef const uint8_t *w = <const uint8_t *> bw.view.buf
    cdef int failed
    with nogil:
        if bo.view.itemsize == 4:
            failed = kernels.unpack_integers_f32(w, bw.view.len, n, <const int32_t *> a,
                                                 <int32_t *> bo.view.buf)
        else:
            failed = kernels.unpack_integers_f64(w, bw.view.len, n, <const int64_t *> a,
                                                 <int64_t *> bo.view.buf)
    if failed:
        raise ValueError(f"{bw.view.len} bytes are no message of {n} integers")


use_isa(os.environ.get("MPIQUANT_ISA", "auto"))

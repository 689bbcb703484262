// Vectors of float32, and the one small matrix product that every float32 operator is made of.
//
// The compiler is told which instructions it may use (see build.py). Everything else is plain C++ with the vector
// extension of GCC and Clang, so one source serves AVX-512, AVX2, NEON and SSE.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include <ATen/Parallel.h>

namespace moh {

using std::int32_t;
using std::int64_t;

#define MOH_INLINE inline __attribute__((always_inline))

// Numbers in one vector, and the columns, in vectors, of the largest tile whose sums stay in registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_VECTORS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, TILE_VECTORS = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, TILE_VECTORS = 4;
#else
constexpr int LANES = 4, TILE_VECTORS = 2;
#endif
constexpr int TILE_ROWS = 6;

// aligned(4): rows of tensors begin anywhere. may_alias: numbers of other types move through them too.
typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

constexpr int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }
constexpr int64_t padded(int64_t n) { return ceil_div(n, LANES) * LANES; }

MOH_INLINE Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
MOH_INLINE void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
MOH_INLINE IntVec load(const int32_t* p) { return *reinterpret_cast<const IntVec*>(p); }
MOH_INLINE void store(int32_t* p, IntVec v) { *reinterpret_cast<IntVec*>(p) = v; }
MOH_INLINE Vec broadcast(float x) { return x - Vec{}; }
MOH_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// Only the first `count` numbers; the others are 0.
MOH_INLINE Vec load_part(const float* p, int64_t count) {
  Vec v{};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

MOH_INLINE void store_part(float* p, Vec v, int64_t count) { std::memcpy(p, &v, count * sizeof(float)); }

// exp(x) for x <= 88, within 2 units in the last place. 0 below -87.3, where float32 ends; NaN stays NaN.
// The polynomial is Cephes'. A loop over std::exp takes a seventh of a whole layer.
MOH_INLINE Vec exponential(Vec x) {
  const Vec rounder = broadcast(12582912.f);  // 1.5 * 2^23: adding it rounds, and leaves the whole number in the low bits
  Vec n = x * broadcast(1.44269504f) + rounder;
  const IntVec power = (IntVec)n << 23;  // the upper bits of the whole number are shifted out
  n -= rounder;
  Vec r = x - n * broadcast(0.693359375f);
  r = r + n * broadcast(2.12194440e-4f);
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + broadcast(1.3981999507e-3f);
  p = p * r + broadcast(8.3334519073e-3f);
  p = p * r + broadcast(4.1665795894e-2f);
  p = p * r + broadcast(1.6666665459e-1f);
  p = p * r + broadcast(5.0000001201e-1f);
  p = p * (r * r) + r + broadcast(1.f);
  const Vec result = (Vec)((IntVec)p + power);
  return x > broadcast(-87.3f) ? result : (x == x ? Vec{} : x);
}

// Element S of every pair of blocks of S lanes changes places: one step of a transpose.
template <int S, int... I>
MOH_INLINE void exchange(Vec& a, Vec& b, std::integer_sequence<int, I...>) {
#ifdef __clang__
  const Vec x = __builtin_shufflevector(a, b, ((I & S) ? LANES + I - S : I)...);
  const Vec y = __builtin_shufflevector(a, b, ((I & S) ? LANES + I : I + S)...);
#else
  const Vec x = __builtin_shuffle(a, b, IntVec{((I & S) ? LANES + I - S : I)...});
  const Vec y = __builtin_shuffle(a, b, IntVec{((I & S) ? LANES + I : I + S)...});
#endif
  a = x;
  b = y;
}

template <int S>
MOH_INLINE void exchange_blocks(Vec (&rows)[LANES]) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++)
    if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, LANES>{});
}

// LANES vectors of LANES numbers, transposed in place.
MOH_INLINE void transpose_block(Vec (&rows)[LANES]) {
  if constexpr (LANES >= 16) exchange_blocks<8>(rows);
  if constexpr (LANES >= 8) exchange_blocks<4>(rows);
  exchange_blocks<2>(rows);
  exchange_blocks<1>(rows);
}

// Rows of a matrix: row i begins at data + i * stride, or with an index at data + index[i] * stride.
template <class T>
struct RowsOf {
  T* data;
  int64_t stride;
  const int32_t* index = nullptr;
  MOH_INLINE T* row(int64_t i) const { return data + (index ? index[i] : i) * stride; }
  RowsOf from(int64_t i, int64_t column = 0) const {
    return index ? RowsOf{data + column, stride, index + i} : RowsOf{data + i * stride + column, stride};
  }
};
using Rows = RowsOf<const float>;
using Target = RowsOf<float>;

// target[c * stride + r] = source row r, column c, for `columns` columns. Rows up to padded(rows) are written, as 0.
inline void transpose(const Rows& source, int64_t rows, int64_t columns, float* target, int64_t stride) {
  for (int64_t r = 0; r < rows; r += LANES)
    for (int64_t c = 0; c < columns; c += LANES) {
      const int64_t count = std::min<int64_t>(LANES, columns - c);
      Vec block[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        block[i] = r + i >= rows ? Vec{} : count == LANES ? load(source.row(r + i) + c) : load_part(source.row(r + i) + c, count);
      transpose_block(block);
      float* to = target + c * stride + r;
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        if (i < count) store(to + i * stride, block[i]);
    }
}

// How the left matrix of a product is read: number (i, k) is column k of row i, or column i of row k.
enum class Left { ROWS, COLUMNS };

// One tile of a product, ROWS x VECTORS * LANES sums that live in registers.
template <int ROWS, int VECTORS, Left LEFT, bool INDEXED_LEFT, bool INDEXED_RIGHT>
__attribute__((noinline)) void tile(
    const Rows a, int64_t i0, const Rows b, int64_t j0, int64_t terms, const Target c, int64_t last, bool add) {
  Vec sum[ROWS][VECTORS] = {};
  const float* left[ROWS];
  if constexpr (LEFT == Left::ROWS)
    for (int i = 0; i < ROWS; i++) left[i] = a.row(i0 + i);
  const float* a_row = a.data + i0;
  const float* b_row = b.data + j0;
  for (int64_t k = 0; k < terms; k++) {
    const float* right = INDEXED_RIGHT ? b_row + b.index[k] * b.stride : b_row;
    Vec y[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) y[j] = load(right + j * LANES);
    const float* column = INDEXED_LEFT ? a_row + a.index[k] * a.stride : a_row;
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const Vec x = broadcast(LEFT == Left::ROWS ? left[i][k] : column[i]);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) sum[i][j] += x * y[j];
    }
    if constexpr (!INDEXED_RIGHT) b_row += b.stride;
    if constexpr (LEFT == Left::COLUMNS && !INDEXED_LEFT) a_row += a.stride;
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {
    float* to = c.row(i0 + i) + j0;
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++, to += LANES) {
      if (j == VECTORS - 1 && last < LANES)
        store_part(to, add ? load_part(to, last) + sum[i][j] : sum[i][j], last);
      else
        store(to, add ? load(to) + sum[i][j] : sum[i][j]);
    }
  }
}

template <int ROWS, int VECTORS, Left LEFT>
MOH_INLINE void pick_tile(
    const Rows& a, int64_t i0, const Rows& b, int64_t j0, int64_t terms, const Target& c, int64_t last, bool add) {
  if constexpr (LEFT == Left::ROWS) {
    tile<ROWS, VECTORS, LEFT, false, false>(a, i0, b, j0, terms, c, last, add);
  } else {
    if (a.index)
      tile<ROWS, VECTORS, LEFT, true, false>(a, i0, b, j0, terms, c, last, add);
    else if (b.index)
      tile<ROWS, VECTORS, LEFT, false, true>(a, i0, b, j0, terms, c, last, add);
    else
      tile<ROWS, VECTORS, LEFT, false, false>(a, i0, b, j0, terms, c, last, add);
  }
}

template <int VECTORS, Left LEFT>
void panel(const Rows& a, int64_t m, const Rows& b, int64_t j0, int64_t terms, const Target& c, int64_t last, bool add) {
  constexpr int ROWS = VECTORS > TILE_VECTORS ? TILE_ROWS - 1 : TILE_ROWS;  // five vectors: 25 sums fit as well as 24
  int64_t i = 0;
  for (; i + ROWS <= m; i += ROWS) pick_tile<ROWS, VECTORS, LEFT>(a, i, b, j0, terms, c, last, add);
  for (; i + 2 <= m; i += 2) pick_tile<2, VECTORS, LEFT>(a, i, b, j0, terms, c, last, add);
  if (i < m) pick_tile<1, VECTORS, LEFT>(a, i, b, j0, terms, c, last, add);
}

// c (m x n) = a b, or += a b. Every number is summed over `terms` in order, whatever the tile: splitting rows or columns
// among threads changes no bit.
//
// Rows of b are read up to padded(n) columns, which must be readable. Of the matrices that carry an index, rows of `a`
// (ROWS) and of c may always; of `a` (COLUMNS) and b only one.
template <Left LEFT = Left::ROWS>
void multiply(const Rows& a, int64_t m, const Rows& b, int64_t terms, const Target& c, int64_t n, bool add) {
  for (int64_t j = 0; j < n;) {
    const int64_t left = ceil_div(n - j, LANES);
    const int64_t vectors = LANES == 16 && left == 5 ? 5 : std::min<int64_t>(left, TILE_VECTORS);
    const int64_t last = std::min<int64_t>(LANES, n - j - (vectors - 1) * LANES);
    switch (vectors) {
      case 1: panel<1, LEFT>(a, m, b, j, terms, c, last, add); break;
      case 2: panel<2, LEFT>(a, m, b, j, terms, c, last, add); break;
      case 3: if constexpr (TILE_VECTORS >= 3) panel<3, LEFT>(a, m, b, j, terms, c, last, add); break;
      case 4: if constexpr (TILE_VECTORS >= 4) panel<4, LEFT>(a, m, b, j, terms, c, last, add); break;
      case 5: if constexpr (LANES == 16) panel<5, LEFT>(a, m, b, j, terms, c, last, add); break;
    }
    j += vectors * LANES;
  }
}

// Calls task(i) for i = 0 .. tasks - 1. Each thread takes the next one that is free, so uneven tasks balance. What a task
// computes must not depend on who runs it; `make()` gives each thread its own scratch.
template <class Make, class Task>
void for_each_task(int64_t tasks, const Make& make, const Task& task) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), tasks), 1, [&](int64_t, int64_t) {
    auto scratch = make();
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(i, scratch);
  });
}

}  // namespace moh

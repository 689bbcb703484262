// `attend_in_place` and `attend_product` in bfloat16 and float16, forward and backward, on libtorch's brgemm.
//
// Queries, keys and values are read where they lie, in one product of all heads for instance; outputs are weighed and
// written where the output projection reads them. See `kernels.attend_in_place` for the arguments.
//
// brgemm multiplies 16-bit matrices into float32 sums, on AMX tiles or by AVX512-BF16, whatever the processor has. Its
// right matrix is packed in pairs: numbers (2 i, j) and (2 i + 1, j) share 32 bits. What is packed here is therefore an
// array of uint32. Scores, softmax and sums are float32.
//
// brgemm compiles a kernel for every shape that it meets (up to 2 ms) and keeps it, in every thread (20 KB). So queries
// and keys are counted in steps of ROW_STEP, and the key blocks of a call are equally wide.

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/constant_pad_nd.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include "brgemm.h"
#include "lists.h"

// brgemm takes bfloat16 only on processors with AVX512-BF16, so functions that run beside it may use its conversions,
// although the library is compiled for all processors with AVX-512.
#ifdef __AVX512F__
#include <immintrin.h>
#define BESIDE_BRGEMM __attribute__((target("avx512bf16")))
#else
#define BESIDE_BRGEMM
#endif

namespace moh {
namespace {

namespace blas = at::native::cpublas;

typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

constexpr int64_t ROW_STEP = 16;
constexpr int64_t QUERIES = 128;        // in a tile
constexpr int64_t FORWARD_KEYS = 512;   // in a block: the scores of a tile stay in the second-level cache
constexpr int64_t BACKWARD_KEYS = 256;  // backward keeps scores, their gradients and three 16-bit copies
constexpr int64_t BACKWARD_TASKS = 16;  // at least: where few heads have keys, blocks of keys are tasks of their own
constexpr float INF = std::numeric_limits<float>::infinity();

int64_t round_up(int64_t n, int64_t step) { return ceil_div(n, step) * step; }

// ---- numbers

// exp(x) for x <= 0, within 4e-6 of it, for weights that are rounded to 16 bits anyway. 0 below -87.3, where float32
// ends; NaN stays NaN.
MOH_INLINE Vec quick_exponential(Vec x) {
  const Vec rounder = broadcast(12582912.f);  // 1.5 * 2^23: see `exponential`
  x *= broadcast(1.44269504f);                // a power of 2
  Vec n = x + rounder;
  const IntVec power = (IntVec)n << 23;
  n -= rounder;
  const Vec r = x - n;
  Vec p = broadcast(9.6700205e-3f);
  p = p * r + broadcast(5.5826318e-2f);
  p = p * r + broadcast(2.4022330e-1f);
  p = p * r + broadcast(6.9314720e-1f);
  p = p * r + broadcast(1.f);
  return x <= broadcast(-126.f) ? Vec{} : (Vec)((IntVec)p + power);
}

// Each number rounded to T, ties to even.
template <class T>
BESIDE_BRGEMM MOH_INLINE Halves rounded(Vec x) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, at::BFloat16>)
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
  else
    return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  Halves result;
  for (int i = 0; i < LANES; i++) result[i] = T(x[i]).x;
  return result;
#endif
}

// All lanes put together, by halves.
template <int S = LANES / 2, class F>
MOH_INLINE float across(Vec x, const F& f) {
  Vec y = x;
  exchange<S>(x, y, std::make_integer_sequence<int, LANES>{});
  if constexpr (S == 1)
    return f(x, y)[0];
  else
    return across<S / 2>(f(x, y), f);
}

MOH_INLINE void store(void* to, Halves x) { *static_cast<Halves*>(to) = x; }

// Pairs of a number of `lower` and one of `upper`.
MOH_INLINE Words paired(Halves lower, Halves upper) {
  return __builtin_convertvector(lower, Words) | __builtin_convertvector(upper, Words) << 16;
}

// to[i] = from[i] * factor, rounded.
template <class T>
BESIDE_BRGEMM void store_row(T* to, const float* from, int64_t count, float factor = 1) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, rounded<T>(load(from + i) * broadcast(factor)));
  if (i == count) return;
  const Halves last = rounded<T>(load_part(from + i, count - i) * broadcast(factor));
  std::memcpy(to + i, &last, (count - i) * sizeof(T));
}

template <class T>
MOH_INLINE Vec load_widened(const T* from) {
  const Halves x = *reinterpret_cast<const Halves*>(from);
  if constexpr (std::is_same_v<T, at::BFloat16>) return (Vec)(__builtin_convertvector(x, Words) << 16);
#ifdef __AVX512F__
  return (Vec)_mm512_cvtph_ps((__m256i)x);
#else
  Vec result;
  for (int i = 0; i < LANES; i++) result[i] = from[i];
  return result;
#endif
}

template <class T>
float dot(const T* a, const T* b, int64_t count) {
  Vec sums{};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sums += load_widened(a + i) * load_widened(b + i);
  float sum = across(sums, [](Vec x, Vec y) { return x + y; });
  for (; i < count; i++) sum += static_cast<float>(a[i]) * static_cast<float>(b[i]);
  return sum;
}

// ---- matrices

// target[c * stride + r] = numbers 2 c and 2 c + 1 of row r; from r = count to stride - 1: 0.
template <class T>
void pack_columns(const T* rows, int64_t row_stride, int64_t count, int64_t pairs, uint32_t* target, int64_t stride) {
  // A pair moves as if it were a float32.
  const Rows floats{reinterpret_cast<const float*>(rows), row_stride / 2};
  transpose(floats, count, pairs, reinterpret_cast<float*>(target), stride);
  for (int64_t c = 0; padded(count) < stride && c < pairs; c++)
    std::fill(target + c * stride + padded(count), target + (c + 1) * stride, 0);
}

// target[i * width + c] = numbers c of rows 2 i and 2 i + 1; rows from `count` on are 0.
template <class T>
void pack_rows(const T* rows, int64_t row_stride, int64_t count, int64_t width, uint32_t* target, int64_t pairs) {
  for (int64_t i = 0; i < pairs; i++, target += width) {
    const T* lower = rows + 2 * i * row_stride;
    const T* upper = lower + row_stride;
    if (2 * i + 1 < count)
      for (int64_t c = 0; c < width; c++) target[c] = lower[c].x | static_cast<uint32_t>(upper[c].x) << 16;
    else if (2 * i < count)
      for (int64_t c = 0; c < width; c++) target[c] = lower[c].x;
    else
      std::fill(target, target + width, 0);
  }
}

// target[d * width + j] = number d of row j; from j = count to width - 1: 0. `scratch` holds D / 2 * width pairs.
template <class T>
void transpose_rows(const T* rows, int64_t row_stride, int64_t count, int64_t D, int64_t width, uint32_t* scratch,
                    T* target) {
  pack_columns(rows, row_stride, count, D / 2, scratch, width);
  for (int64_t d = 0; d < D; d += 2, scratch += width)
    for (int64_t j = 0; j < width; j += LANES) {
      const Words pair = (Words)load(reinterpret_cast<const float*>(scratch) + j);
      store(target + d * width + j, __builtin_convertvector(pair & 0xffff, Halves));
      store(target + (d + 1) * width + j, __builtin_convertvector(pair >> 16, Halves));
    }
}

// c (m x n) = a b, or += a b. Strides count numbers, of c and a, and pairs, of b.
template <class T>
void multiply16(const T* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c, int64_t c_stride,
                int64_t m, int64_t n, int64_t terms, bool add) {
  blas::brgemm(m, n, terms, a_stride, b_stride, c_stride, add, a, reinterpret_cast<const T*>(b), c);
}

// Uninitialised memory that begins at a cache line.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : memory_(c10::GetCPUAllocator()->allocate(count * sizeof(T))) {}
  operator T*() const { return static_cast<T*>(memory_.get()); }

 private:
  at::DataPtr memory_;
};

// Base of what a thread holds while it multiplies: gives the tile registers back at the end.
struct BrgemmThread {
  BrgemmThread() = default;
  BrgemmThread(const BrgemmThread&) = delete;
  ~BrgemmThread() { blas::brgemm_release(); }
};

// ---- one call

// The keys of a sequence, in equally wide blocks.
struct Blocks {
  int64_t keys, count, width;
  Blocks(int64_t keys, int64_t most)
      : keys(keys), count(std::max<int64_t>(1, ceil_div(keys, most))),
        width(round_up(ceil_div(keys, count), ROW_STEP)) {}
  int64_t begin(int64_t block) const { return std::min(keys, block * width); }
  int64_t size(int64_t block) const { return begin(block + 1) - begin(block); }
};

// Rows that can be read in pairs of numbers: an odd width gets a column of zeros, which changes no product. Rows that
// overlap, those of expanded keys, are no matrix to brgemm.
Tensor even_rows(const Tensor& x) {
  bool fits = x.size(3) % 2 == 0 && x.stride(3) == 1 && x.stride(2) >= x.size(3);
  for (int dim = 0; dim < 3; dim++) fits = fits && x.stride(dim) % 2 == 0;
  if (fits) return x;
  return (x.size(3) % 2 ? at::constant_pad_nd(x, {0, 1}) : x).contiguous();
}

// The gates of pairs, [B, N or 1, H]; without them every gate is 1.
struct Gates {
  const float* data = nullptr;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;

  explicit Gates(const std::optional<Tensor>&&) = delete;  // see HeadRows
  explicit Gates(const std::optional<Tensor>& weights) {
    if (!weights) return;
    data = weights->const_data_ptr<float>();
    batch_stride = weights->stride(0);
    token_stride = weights->size(1) > 1 ? weights->stride(1) : 0;
    head_stride = weights->stride(2);
  }
  float at(int64_t b, int64_t n, int64_t h) const {
    return data ? data[b * batch_stride + n * token_stride + h * head_stride] : 1;
  }
};

// Numbers [B, N, H, width] side by side: outputs of all heads and their gradients.
template <class T>
struct Outputs {
  T* data;
  int64_t N, H, width;
  T* row(int64_t b, int64_t n, int64_t h) const { return data + ((b * N + n) * H + h) * width; }
};

template <class T>
struct Call {
  const Tensor q_tensor, k_tensor, v_tensor;
  // Width of a head, and as it is multiplied: an even number.
  const int64_t width, D;
  const int64_t B, H, N, M, sources;  // sources: B * G
  const Pairs pairs;
  const HeadRows<T> q, k, v;
  const std::vector<int32_t> source;  // of each segment
  const Gates gates;
  const Mask mask;
  const float scale;

  Call(const Tensor& q_, const Tensor& k_, const Tensor& v_, const std::optional<Tensor>& weights, const Tensor& token,
       const Tensor& offsets, bool is_causal, const std::optional<Tensor>& mask_)
      : q_tensor(with_contiguous_rows(q_)), k_tensor(even_rows(k_)), v_tensor(even_rows(v_)), width(q_.size(3)),
        D(round_up(width, 2)), B(q_.size(0)), H(q_.size(1)), N(q_.size(2)), M(k_.size(2)), sources(B * k_.size(1)),
        pairs(token, offsets, H, N), q(q_tensor), k(k_tensor), v(v_tensor),
        source(moh::sources(std::nullopt, pairs, H, k_)), gates(weights), mask(mask_, is_causal, B),
        scale(1 / std::sqrt(static_cast<float>(width))) {}
  bool masked() const { return mask.added || mask.seen; }
  int64_t sequence(int64_t segment) const { return segment % B; }
  int64_t head(int64_t segment) const { return segment / B; }
  int64_t place(int64_t pair) const { return pairs.token[pair] % N; }  // row of the query in its sequence
  // Keys that the query may see, as far as their order decides.
  int64_t visible(int64_t pair) const { return mask.causal ? std::min(M, place(pair) + 1) : M; }
  float gate(int64_t segment, int64_t pair) const {
    return gates.at(sequence(segment), place(pair), head(segment));
  }
};

// Rows of the pairs of a tile, one after the other with D numbers each; `rows` of them, those behind the tile 0.
// row(n) is that of token n.
template <class T, class Row>
void gather_rows(const Call<T>& call, const Piece& tile, int64_t rows, T* to, const Row& row) {
  for (int64_t i = 0; i < tile.size(); i++, to += call.D) {
    std::memcpy(to, row(call.place(tile.begin + i)), call.width * sizeof(T));
    std::fill(to + call.width, to + call.D, T(0.f));
  }
  std::fill_n(to, (rows - tile.size()) * call.D, T(0.f));
}

template <class T>
void gather_queries(const Call<T>& call, const Piece& tile, int64_t rows, T* to) {
  const T* queries = call.q.at(call.sequence(tile.segment) * call.H + call.head(tile.segment));
  gather_rows(call, tile, rows, to, [&](int64_t n) { return queries + n * call.q.stride; });
}

// The segments that read each source, in order; empty ones are left out.
template <class T>
std::vector<std::vector<int32_t>> readers_of(const Call<T>& call) {
  std::vector<std::vector<int32_t>> readers(call.sources);
  for (int32_t s = 0; s < call.pairs.segments; s++)
    if (call.pairs.begin(s) < call.pairs.end(s)) readers[call.source[s]].push_back(s);
  return readers;
}

// Calls f with the tiles of queries of one segment.
template <class F>
void for_each_tile(const Pairs& pairs, int32_t segment, const F& f) {
  for (int64_t p = pairs.begin(segment); p < pairs.end(segment); p += QUERIES)
    f(Piece{segment, p, std::min(p + QUERIES, pairs.end(segment))});
}

// ---- forward

// Keys and values of some sources, packed: keys by columns [slots][blocks][D / 2][width], values by rows
// [slots][blocks][width / 2][D].
template <class T>
struct PackedKeys {
  const Call<T>& call;
  const Blocks blocks;
  const int64_t block_size;
  Buffer<uint32_t> k, v;

  PackedKeys(const Call<T>& call, int64_t slots)
      : call(call), blocks(call.M, FORWARD_KEYS), block_size(call.D / 2 * blocks.width),
        k(slots * blocks.count * block_size), v(slots * blocks.count * block_size) {}
  void pack(int64_t source, int64_t block, int64_t slot) {
    const int64_t begin = blocks.begin(block), size = blocks.size(block), D = call.D, width = blocks.width;
    pack_columns(call.k.at(source) + begin * call.k.stride, call.k.stride, size, D / 2, keys(slot, block), width);
    pack_rows(call.v.at(source) + begin * call.v.stride, call.v.stride, size, D, values(slot, block), width / 2);
  }
  uint32_t* keys(int64_t slot, int64_t block) const { return k + (slot * blocks.count + block) * block_size; }
  uint32_t* values(int64_t slot, int64_t block) const { return v + (slot * blocks.count + block) * block_size; }
};

template <class T>
struct ForwardScratch : BrgemmThread {
  Buffer<T> queries, weights;  // weights: [QUERIES][width]
  Buffer<float> scores, sums;  // sums: of weighted values, [QUERIES][D]
  float highest[QUERIES];      // score up to now
  float total[QUERIES];        // of weights
  explicit ForwardScratch(const Call<T>& call) : ForwardScratch(call.D, Blocks(call.M, FORWARD_KEYS).width) {}
  ForwardScratch(int64_t D, int64_t width)
      : queries(QUERIES * D), weights(QUERIES * width), scores(QUERIES * width), sums(QUERIES * D) {}
};

// scores[j] = scale * score + mask, of the query at token n and key first + j.
void mask_row(const Mask& mask, float* scores, int64_t segment, int64_t n, int64_t first, int64_t keys, float scale) {
  const int64_t base =
      segment % mask.batch * mask.batch_stride + segment / mask.batch * mask.head_stride + n * mask.row_stride + first;
  if (mask.added)
    for (int64_t j = 0; j < keys; j++) scores[j] = scores[j] * scale + mask.added[base + j];
  else
    for (int64_t j = 0; j < keys; j++) scores[j] = mask.seen[base + j] ? scores[j] * scale : -INF;
}

// weights[j] = exp(scale * (scores[j] - highest)) for one block of one row; `highest` and `total` take the block in.
// Returns what sums of earlier blocks must be multiplied by. `width` is a multiple of LANES.
template <class T>
BESIDE_BRGEMM float soften(const float* scores, int64_t width, float scale, T* weights, float& highest, float& total) {
  Vec best = broadcast(-INF);
  for (int64_t j = 0; j < width; j += LANES) best = maximum(load(scores + j), best);
  const float top = across(best, maximum);
  const float before = highest;
  highest = std::max(before, top);
  const float shift = highest == -INF ? 0 : highest;  // no key is seen yet

  Vec sum{};
  for (int64_t j = 0; j < width; j += LANES) {
    const Vec weight = quick_exponential((load(scores + j) - broadcast(shift)) * broadcast(scale));
    sum += weight;
    store(weights + j, rounded<T>(weight));
  }
  const float shrink = before == highest ? 1 : std::exp((before - shift) * scale);
  total = total * shrink + across(sum, [](Vec x, Vec y) { return x + y; });
  return shrink;
}

template <class T>
void attend_tile(const PackedKeys<T>& packed, int64_t slot, const Piece& tile, const Outputs<T>& o, float* lse,
                 ForwardScratch<T>& s) {
  const Call<T>& call = packed.call;
  const int64_t D = call.D, rows = round_up(tile.size(), ROW_STEP), width = packed.blocks.width;
  gather_queries<T>(call, tile, rows, s.queries);
  std::fill_n(s.highest, tile.size(), -INF);
  std::fill_n(s.total, tile.size(), 0);
  const float scale = call.masked() ? 1 : call.scale;  // a mask is added to scaled scores

  const int64_t visible = call.visible(tile.end - 1);  // to any query: they are sorted
  for (int64_t block = 0; block < packed.blocks.count && packed.blocks.begin(block) < visible; block++) {
    const int64_t first = packed.blocks.begin(block), size = packed.blocks.size(block);
    multiply16<T>(s.queries, D, packed.keys(slot, block), width, s.scores, width, rows, width, D, false);
    for (int64_t i = 0; i < tile.size(); i++) {
      float* scores = s.scores + i * width;
      const int64_t seen = std::clamp<int64_t>(call.visible(tile.begin + i) - first, 0, size);
      if (call.masked()) mask_row(call.mask, scores, tile.segment, call.place(tile.begin + i), first, seen, call.scale);
      std::fill(scores + seen, scores + width, -INF);
      const float shrink = soften<T>(scores, width, scale, s.weights + i * width, s.highest[i], s.total[i]);
      if (block > 0 && shrink != 1)
        for (int64_t d = 0; d < D; d++) s.sums[i * D + d] *= shrink;
    }
    multiply16<T>(s.weights, width, packed.values(slot, block), D, s.sums, D, rows, D, width, block > 0);
  }

  for (int64_t i = 0; i < tile.size(); i++) {
    const int64_t pair = tile.begin + i;
    T* to = o.row(call.sequence(tile.segment), call.place(pair), call.head(tile.segment));
    if (s.total[i] == 0) {  // the query sees no key
      std::fill_n(to, call.width, T(0.f));
      lse[pair] = INF;
    } else {
      store_row(to, s.sums + i * D, call.width, call.gate(tile.segment, pair) / s.total[i]);
      lse[pair] = s.highest[i] * scale + std::log(s.total[i]);
    }
  }
}

template <class T>
void attend_forward(const Call<T>& call, const Outputs<T>& o, float* lse) {
  const auto readers = readers_of(call);
  if (call.sources >= 4 * at::get_num_threads()) {
    // Enough for all threads: a task packs one and runs all that reads it while it is in the cache.
    struct Scratch : ForwardScratch<T> {
      PackedKeys<T> packed;
      explicit Scratch(const Call<T>& call) : ForwardScratch<T>(call), packed(call, 1) {}
    };
    for_each_task(call.sources, [&] { return Scratch(call); }, [&](int64_t source, Scratch& s) {
      for (int64_t block = 0; block < s.packed.blocks.count && !readers[source].empty(); block++)
        s.packed.pack(source, block, 0);
      for (const int32_t segment : readers[source])
        for_each_tile(call.pairs, segment, [&](const Piece& tile) { attend_tile(s.packed, 0, tile, o, lse, s); });
    });
  } else {
    PackedKeys<T> packed(call, call.sources);
    at::parallel_for(0, call.sources * packed.blocks.count, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        const int64_t source = i / packed.blocks.count;
        if (!readers[source].empty()) packed.pack(source, i % packed.blocks.count, source);
      }
    });
    const std::vector<Piece> tiles = pieces(call.pairs, 1, QUERIES);
    for_each_task(tiles.size(), [&] { return ForwardScratch<T>(call); }, [&](int64_t i, ForwardScratch<T>& s) {
      attend_tile(packed, call.source[tiles[i].segment], tiles[i], o, lse, s);
    });
  }
}

// ---- backward: scores lie transposed, keys x queries, so that weights and gradients of scores are left matrices

// Gradients of queries, keys or values [B, h, n, D] where they are written.
template <class T>
struct GradientRows {
  T* data;
  int64_t batch_stride, head_stride, stride;

  explicit GradientRows(const Tensor&&) = delete;  // see HeadRows
  explicit GradientRows(const Tensor& x)
      : data(x.data_ptr<T>()), batch_stride(x.stride(0)), head_stride(x.stride(1)), stride(x.stride(2)) {}
  T* row(int64_t b, int64_t h, int64_t n) const { return data + b * batch_stride + h * head_stride + n * stride; }
};

template <class T>
struct Gradients {
  const Outputs<const T> grad, o;
  const float* lse;
  const GradientRows<T> dq, dk, dv;
  const Outputs<float> dgates;  // a number each
  // Where keys are split among tasks: their shares of dq [parts][P][D] and dgates [parts][P], else null.
  float *partial_dq, *partial_dgates;
};

template <class T>
struct BackwardScratch : BrgemmThread {
  Buffer<uint32_t> q_columns, q_rows, grad_columns, grad_rows;  // a tile of queries, packed both ways
  Buffer<T> last_keys, last_values;                             // of the last block, [width][D]
  Buffer<T> k_columns;                                          // keys of the part, [blocks][D][width]
  Buffer<uint32_t> k_pairs;                                     // and of a block, [D / 2][width]
  Buffer<float> dk, dv;                                         // of the part, [keys][D]
  Buffer<float> dq, dq_rows;                                    // of the tile, [D][QUERIES], and transposed
  Buffer<float> scores, d_weights;                              // [width][QUERIES]
  Buffer<T> weights, d_scores;                                  // [width][QUERIES]
  Buffer<uint32_t> d_score_pairs;                               // [width / 2][QUERIES]
  Buffer<T> rows;                                               // queries, then gradients of outputs, [QUERIES][D]
  float lse[QUERIES], delta[QUERIES];                           // delta: weighed output times its gradient
  float gate[QUERIES], dgate[QUERIES];
  int32_t place[QUERIES];

  BackwardScratch(int64_t D, int64_t width, int64_t blocks)
      : q_columns(D / 2 * QUERIES), q_rows(D / 2 * QUERIES), grad_columns(D / 2 * QUERIES), grad_rows(D / 2 * QUERIES),
        last_keys(width * D), last_values(width * D), k_columns(blocks * width * D), k_pairs(D / 2 * width),
        dk(blocks * width * D), dv(blocks * width * D),
        dq(D * QUERIES), dq_rows(padded(D) * QUERIES), scores(width * QUERIES), d_weights(width * QUERIES),
        weights(width * QUERIES), d_scores(width * QUERIES), d_score_pairs(width / 2 * QUERIES), rows(QUERIES * D) {}
};

// From the scores of one key and queries i .. i + LANES - 1, which lie from `at` on: stores gated weights and gradients of
// scores, and returns the latter. The gradient of a gate is the output before the gate times the gradient of that after
// it, the sum over keys of weight * d_weight: so it is exact where the gate is 0.
template <class T>
BESIDE_BRGEMM MOH_INLINE Halves differentiate_lanes(
    BackwardScratch<T>& s, int64_t at, int64_t i, float score_scale, float scale, bool causal, int32_t key) {
  Vec weight = quick_exponential(load(s.scores + at) * broadcast(score_scale) - load(s.lse + i));
  if (causal) {
    const IntVec place = *reinterpret_cast<const IntVec*>(s.place + i);
    weight = place >= key ? weight : Vec{};
  }
  const Vec gate = load(s.gate + i), d_weight = load(s.d_weights + at);
  moh::store(s.dgate + i, load(s.dgate + i) + weight * d_weight);
  const Vec d_score = weight * (gate * d_weight - load(s.delta + i)) * broadcast(scale);
  const Halves result = rounded<T>(d_score);
  store(s.weights + at, rounded<T>(gate * weight));
  store(s.d_scores + at, result);
  return result;
}

// The same for keys `begin` .. begin + size - 1 and `rows` queries. Gradients are stored in pairs too, of two keys, and
// are 0 for the keys that widen the block.
template <class T>
BESIDE_BRGEMM void differentiate(
    const Call<T>& call, BackwardScratch<T>& s, int64_t rows, int64_t begin, int64_t size, int64_t width) {
  const float score_scale = call.masked() ? 1 : call.scale;
  const bool causal = call.mask.causal;
  for (int64_t j = 0; j < size; j += 2)
    for (int64_t i = 0; i < rows; i += LANES) {
      const int64_t at = j * rows + i;
      const Halves lower = differentiate_lanes(s, at, i, score_scale, call.scale, causal, begin + j);
      Halves upper{};
      if (j + 1 < size) upper = differentiate_lanes(s, at + rows, i, score_scale, call.scale, causal, begin + j + 1);
      *reinterpret_cast<Words*>(s.d_score_pairs + j / 2 * rows + i) = paired(lower, upper);
    }
  std::fill(s.d_score_pairs + ceil_div(size, 2) * rows, s.d_score_pairs + width / 2 * rows, 0);
}

// One task: all that the blocks first .. last - 1 of the keys of one source give and get.
template <class T>
struct BackwardTask {
  const Call<T>& call;
  const Gradients<T>& to;
  const Blocks& blocks;
  const int64_t source, part, first, last;
  BackwardScratch<T>& s;
  const int64_t D = call.D, width = blocks.width;

  void run(const std::vector<int32_t>& readers) {
    std::fill_n(static_cast<float*>(s.dk), (last - first) * width * D, 0.f);
    std::fill_n(static_cast<float*>(s.dv), (last - first) * width * D, 0.f);
    if (!readers.empty()) load_keys();
    for (const int32_t segment : readers)
      for_each_tile(call.pairs, segment, [&](const Piece& tile) { run_tile(tile); });
    write_keys(s.dk, to.dk);
    write_keys(s.dv, to.dv);
  }

  void run_tile(const Piece& tile) {
    const int64_t rows = round_up(tile.size(), ROW_STEP), visible = call.visible(tile.end - 1);
    load_queries(tile, rows);
    std::fill_n(static_cast<float*>(s.dq), D * rows, 0.f);
    for (int64_t block = first; block < last && blocks.begin(block) < visible; block++) {
      const int64_t begin = blocks.begin(block), size = blocks.size(block), sums = (block - first) * width * D;
      const bool full = size == width;
      const T *keys = full ? key(block) : s.last_keys, *values = full ? value(block) : s.last_values;
      multiply16<T>(keys, full ? call.k.stride : D, s.q_columns, rows, s.scores, rows, width, rows, D, false);
      multiply16<T>(values, full ? call.v.stride : D, s.grad_columns, rows, s.d_weights, rows, width, rows, D, false);
      if (call.masked())
        call.mask.apply(s.scores, rows, tile.segment, s.place, tile.size(), begin, size, call.scale);
      differentiate(call, s, rows, begin, size, width);
      multiply16<T>(s.weights, rows, s.grad_rows, D, s.dv + sums, D, width, D, rows, true);
      multiply16<T>(s.d_scores, rows, s.q_rows, D, s.dk + sums, D, width, D, rows, true);
      multiply16<T>(k_columns(block), width, s.d_score_pairs, rows, s.dq, rows, D, rows, width, true);
    }
    write_queries(tile, rows);
  }

  // Keys transposed; the rows of a block that is not full, copied: what follows them is not ours to read.
  void load_keys() {
    for (int64_t block = first; block < last; block++) {
      const int64_t size = blocks.size(block);
      transpose_rows(key(block), call.k.stride, size, D, width, s.k_pairs, k_columns(block));
      if (size == width) continue;
      copy_rows(key(block), call.k.stride, size, s.last_keys);
      copy_rows(value(block), call.v.stride, size, s.last_values);
    }
  }

  void copy_rows(const T* rows, int64_t stride, int64_t size, T* to) {
    for (int64_t i = 0; i < size; i++) std::memcpy(to + i * D, rows + i * stride, D * sizeof(T));
    std::fill(to + size * D, to + width * D, T(0.f));
  }

  // Rows that pad the tile get no weight.
  void load_queries(const Piece& tile, int64_t rows) {
    gather_queries<T>(call, tile, rows, s.rows);
    pack_columns<T>(s.rows, D, rows, D / 2, s.q_columns, rows);
    pack_rows<T>(s.rows, D, rows, D, s.q_rows, rows / 2);
    const int64_t b = call.sequence(tile.segment), h = call.head(tile.segment);
    gather_rows<T>(call, tile, rows, s.rows, [&](int64_t n) { return to.grad.row(b, n, h); });
    pack_columns<T>(s.rows, D, rows, D / 2, s.grad_columns, rows);
    pack_rows<T>(s.rows, D, rows, D, s.grad_rows, rows / 2);
    std::fill_n(s.dgate, rows, 0.f);
    for (int64_t i = 0; i < tile.size(); i++) {
      const int64_t n = call.place(tile.begin + i);
      s.lse[i] = to.lse[tile.begin + i];
      s.delta[i] = dot(to.grad.row(b, n, h), to.o.row(b, n, h), call.width);
      s.gate[i] = call.gate(tile.segment, tile.begin + i);
      s.place[i] = n;
    }
    for (int64_t i = tile.size(); i < rows; i++) {
      s.lse[i] = INF;
      s.delta[i] = s.gate[i] = 0;
      s.place[i] = 0;
    }
  }

  void write_queries(const Piece& tile, int64_t rows) {
    transpose({s.dq, rows}, D, tile.size(), s.dq_rows, padded(D));
    const int64_t b = call.sequence(tile.segment), h = call.head(tile.segment);
    for (int64_t i = 0; i < tile.size(); i++) {
      const int64_t pair = tile.begin + i, n = call.place(pair);
      const float* row = s.dq_rows + i * padded(D);
      if (to.partial_dq) {
        std::copy_n(row, D, to.partial_dq + (part * call.pairs.count + pair) * D);
        to.partial_dgates[part * call.pairs.count + pair] = s.dgate[i];
      } else {
        store_row(to.dq.row(b, h, n), row, call.width);
        *to.dgates.row(b, n, h) = s.dgate[i];
      }
    }
  }

  void write_keys(const float* sums, const GradientRows<T>& target) {
    const int64_t G = call.k.groups, b = source / G, g = source % G;
    for (int64_t key = blocks.begin(first); key < blocks.begin(last); key++, sums += D)
      store_row(target.row(b, g, key), sums, call.width);
  }

  const T* key(int64_t block) const { return call.k.at(source) + blocks.begin(block) * call.k.stride; }
  const T* value(int64_t block) const { return call.v.at(source) + blocks.begin(block) * call.v.stride; }
  T* k_columns(int64_t block) const { return s.k_columns + (block - first) * width * D; }
};

// The gradients of queries and gates are the sums of their parts, in order.
template <class T>
void sum_parts(const Call<T>& call, const Gradients<T>& to, int64_t parts) {
  const int64_t D = call.D, P = call.pairs.count;
  for_each_task(call.pairs.segments, [&] { return std::vector<float>(D); }, [&](int64_t segment, std::vector<float>& sum) {
    const int64_t b = call.sequence(segment), h = call.head(segment);
    for (int64_t pair = call.pairs.begin(segment); pair < call.pairs.end(segment); pair++) {
      std::fill(sum.begin(), sum.end(), 0.f);
      float dgate = 0;
      for (int64_t part = 0; part < parts; part++) {
        const float* row = to.partial_dq + (part * P + pair) * D;
        for (int64_t d = 0; d < D; d++) sum[d] += row[d];
        dgate += to.partial_dgates[part * P + pair];
      }
      const int64_t n = call.place(pair);
      store_row(to.dq.row(b, h, n), sum.data(), call.width);
      *to.dgates.row(b, n, h) = dgate;
    }
  });
}

template <class T>
void attend_backward(const Call<T>& call, Gradients<T> to) {
  const Blocks blocks(call.M, BACKWARD_KEYS);
  // Shapes alone decide on the number of parts, and so on the order of every sum.
  const int64_t wanted = ceil_div(BACKWARD_TASKS, std::max<int64_t>(1, call.sources));
  const int64_t parts = std::min(wanted, blocks.count);
  const int64_t partial = parts > 1 ? parts * call.pairs.count : 0;
  const Buffer<float> partial_dq(partial * call.D), partial_dgates(partial);
  if (parts > 1) {
    to.partial_dq = partial_dq;
    to.partial_dgates = partial_dgates;
  }
  const auto readers = readers_of(call);
  for_each_task(
      call.sources * parts, [&] { return BackwardScratch<T>(call.D, blocks.width, ceil_div(blocks.count, parts)); },
      [&](int64_t task, BackwardScratch<T>& scratch) {
        const int64_t source = task / parts, part = task % parts;
        const int64_t first = blocks.count * part / parts, last = blocks.count * (part + 1) / parts;
        BackwardTask<T>{call, to, blocks, source, part, first, last, scratch}.run(readers[source]);
      });
  if (parts > 1) sum_parts(call, to, parts);
}

// ---- availability and dispatch

// Whether this processor and this torch multiply pairs of T, and rightly: one small product tells.
template <class T>
bool brgemm_works() {
#ifdef __AVX512F__
  if (!__builtin_cpu_supports("avx512bf16")) return false;
#endif
  constexpr int64_t SIZE = 32;
  // Row i of a picks rows i and i ^ 1 of b, once and twice; number (k, j) of b is k + j % 2.
  std::vector<T> a(SIZE * SIZE, T(0.f)), rows(SIZE * SIZE);
  for (int64_t i = 0; i < SIZE; i++) {
    a[i * SIZE + i] = T(1.f);
    a[i * SIZE + (i ^ 1)] = T(2.f);
    for (int64_t j = 0; j < SIZE; j++) rows[i * SIZE + j] = T(static_cast<float>(i + j % 2));
  }
  std::vector<uint32_t> b(SIZE / 2 * SIZE);
  std::vector<float> c(SIZE * SIZE);
  pack_rows(rows.data(), SIZE, SIZE, SIZE, b.data(), SIZE / 2);
  try {
    BrgemmThread thread;
    multiply16<T>(a.data(), SIZE, b.data(), SIZE, c.data(), SIZE, SIZE, SIZE, SIZE, false);
  } catch (const std::exception&) {  // torch's error, or oneDNN's where it is held to an older instruction set
    return false;
  }
  for (int64_t i = 0; i < SIZE; i++)
    for (int64_t j = 0; j < SIZE; j++)
      if (c[i * SIZE + j] != static_cast<float>(i + 2 * (i ^ 1) + 3 * (j % 2))) return false;
  return true;
}

}  // namespace

bool brgemm_available(at::ScalarType dtype) {
  static const bool bfloat16 = brgemm_works<at::BFloat16>(), float16 = brgemm_works<at::Half>();
  if (!at::globalContext().userEnabledMkldnn()) return false;  // brgemm is part of oneDNN
  return dtype == at::kBFloat16 ? bfloat16 : dtype == at::kHalf && float16;
}

namespace {

// Calls f with a number of the type that is multiplied.
template <class F>
auto for_type(at::ScalarType dtype, const F& f) {
  return dtype == at::kBFloat16 ? f(at::BFloat16()) : f(at::Half());
}

void check(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& weights,
           const Tensor& offsets, const std::optional<Tensor>& mask) {
  TORCH_CHECK(q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf, "q is ", q.scalar_type(),
              ", not bfloat16 or float16");
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), "q, k and v differ in dtype");
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.sizes() == k.sizes(), "q, k and v are ", q.sizes(), ", ", k.sizes(), " and ",
              v.sizes(), ", not [B, H, N, D] and twice [B, G, M, D]");
  const int64_t B = q.size(0), H = q.size(1), N = q.size(2), G = k.size(1);
  TORCH_CHECK(k.size(0) == B && k.size(3) == q.size(3) && G > 0 && H % G == 0, "q is ", q.sizes(), " and k ", k.sizes());
  TORCH_CHECK(offsets.numel() - 1 == H * B, "the segments are not those of ", H, " heads and ", B, " sequences");
  if (weights) {
    const bool shaped = weights->dim() == 3 && weights->size(0) == B && weights->size(2) == H &&
                        (weights->size(1) == N || weights->size(1) == 1);
    TORCH_CHECK(shaped && weights->scalar_type() == at::kFloat, "weights are ", weights->scalar_type(), " ",
                weights->sizes(), ", not float32 [", B, ", ", N, " or 1, ", H, "]");
  }
  check_mask(mask, B, H, N, k.size(2));
}

std::tuple<Tensor, Tensor> attend_in_place(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const std::optional<Tensor>& weights, const Tensor& token,
                                           const Tensor& offsets, bool is_causal, const std::optional<Tensor>& mask) {
  check(q, k, v, weights, offsets, mask);
  const int64_t B = q.size(0), H = q.size(1), N = q.size(2), D = q.size(3);
  const bool all_run = token.numel() == B * N * H;
  const Tensor o = all_run ? at::empty({B, N, H * D}, q.options()) : at::zeros({B, N, H * D}, q.options());
  const Tensor lse = at::empty({token.numel()}, q.options().dtype(at::kFloat));
  for_type(q.scalar_type(), [&](auto number) {
    using T = decltype(number);
    attend_forward(Call<T>(q, k, v, weights, token, offsets, is_causal, mask), Outputs<T>{o.data_ptr<T>(), N, H, D},
                   lse.data_ptr<float>());
  });
  return {o, lse};
}

// Writes the gradients of queries, keys and values into dq [B, H, N, D], dk and dv [B, G, M, D], with any strides but those
// of a row's numbers, and returns those of the gates; without gates an empty tensor.
Tensor write_gradients(const Tensor& grad_, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o_,
                       const Tensor& lse_, const std::optional<Tensor>& weights, const Tensor& token,
                       const Tensor& offsets, bool is_causal, const std::optional<Tensor>& mask, const Tensor& dq,
                       const Tensor& dk, const Tensor& dv) {
  check(q, k, v, weights, offsets, mask);
  const int64_t B = q.size(0), H = q.size(1), N = q.size(2), D = q.size(3);
  TORCH_CHECK(grad_.sizes() == at::IntArrayRef({B, N, H * D}) && o_.sizes() == grad_.sizes() && grad_.dtype() == q.dtype(),
              "o and its gradient are ", o_.sizes(), " and ", grad_.sizes(), " of ", grad_.dtype());
  TORCH_CHECK(lse_.numel() == token.numel(), "lse has ", lse_.numel(), " numbers for ", token.numel(), " pairs");
  const Tensor grad = grad_.contiguous(), o = o_.contiguous(), lse = lse_.contiguous();
  const Tensor dgates = at::zeros({B, N, H}, lse.options());
  if (token.numel() < B * N * H) dq.zero_();
  for_type(q.scalar_type(), [&](auto number) {
    using T = decltype(number);
    const Outputs<const T> grads{grad.const_data_ptr<T>(), N, H, D}, outputs{o.const_data_ptr<T>(), N, H, D};
    const Gradients<T> to{grads, outputs, lse.const_data_ptr<float>(), GradientRows<T>(dq), GradientRows<T>(dk),
                          GradientRows<T>(dv), Outputs<float>{dgates.data_ptr<float>(), N, H, 1}, nullptr, nullptr};
    attend_backward(Call<T>(q, k, v, weights, token, offsets, is_causal, mask), to);
  });
  if (!weights) return at::empty({0}, lse.options());
  return weights->size(1) < N ? dgates.sum(1, true) : dgates;
}

// In memory [B, n, h, D], the order of a product's columns.
Tensor new_gradient(const Tensor& x) {
  return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attend_in_place_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
    const std::optional<Tensor>& weights, const Tensor& token, const Tensor& offsets, bool is_causal,
    const std::optional<Tensor>& mask) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v are not [B, h, n, D]");
  const Tensor dq = new_gradient(q), dk = new_gradient(k), dv = new_gradient(v);
  const Tensor dgates =
      write_gradients(grad, q, k, v, o, lse, weights, token, offsets, is_causal, mask, dq, dk, dv);
  return {dq, dk, dv, dgates};
}

// Views of a product [B, N, (H + 2 * G) * D]: queries [B, H, N, D], keys and values [B, G, N, D].
std::array<Tensor, 3> split_product(const Tensor& product, int64_t H, int64_t G) {
  const int64_t heads = H + 2 * G;
  TORCH_CHECK(product.dim() == 3 && H > 0 && G > 0 && product.size(2) % heads == 0, "the product is ", product.sizes(),
              ", not [B, N, (H + 2 * G) * D] of H = ", H, " and G = ", G);
  const Tensor rows = product.unflatten(2, {heads, product.size(2) / heads}).transpose(1, 2);  // [B, H + 2 * G, N, D]
  return {rows.narrow(1, 0, H), rows.narrow(1, H, G), rows.narrow(1, H + G, G)};
}

std::tuple<Tensor, Tensor> attend_product(const Tensor& product, int64_t H, int64_t G, const std::optional<Tensor>& weights,
                                          const Tensor& token, const Tensor& offsets, bool is_causal,
                                          const std::optional<Tensor>& mask) {
  const auto [q, k, v] = split_product(product, H, G);
  return attend_in_place(q, k, v, weights, token, offsets, is_causal, mask);
}

std::tuple<Tensor, Tensor> attend_product_backward(const Tensor& grad, const Tensor& product, const Tensor& o,
                                                   const Tensor& lse, int64_t H, int64_t G,
                                                   const std::optional<Tensor>& weights, const Tensor& token,
                                                   const Tensor& offsets, bool is_causal,
                                                   const std::optional<Tensor>& mask) {
  const Tensor dproduct = at::empty(product.sizes(), product.options());
  const auto [q, k, v] = split_product(product, H, G);
  const auto [dq, dk, dv] = split_product(dproduct, H, G);
  const Tensor dgates =
      write_gradients(grad, q, k, v, o, lse, weights, token, offsets, is_causal, mask, dq, dk, dv);
  return {dproduct, dgates};
}

}  // namespace

#define MOH_LISTS "Tensor? weights, Tensor token, Tensor offsets, bool is_causal, Tensor? mask"
#define MOH_PRODUCT "int heads, int kv_heads, " MOH_LISTS

TORCH_LIBRARY_FRAGMENT(moh_vision, m) {
  m.def("brgemm_available(ScalarType dtype) -> bool", &brgemm_available);
  m.def("attend_in_place(Tensor q, Tensor k, Tensor v, " MOH_LISTS ") -> (Tensor, Tensor)");
  m.def("attend_in_place_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, " MOH_LISTS
        ") -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("attend_product(Tensor product, " MOH_PRODUCT ") -> (Tensor, Tensor)");
  m.def("attend_product_backward(Tensor grad, Tensor product, Tensor o, Tensor lse, " MOH_PRODUCT ") -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(moh_vision, CPU, m) {
  m.impl("attend_in_place", &attend_in_place);
  m.impl("attend_in_place_backward", &attend_in_place_backward);
  m.impl("attend_product", &attend_product);
  m.impl("attend_product_backward", &attend_product_backward);
}

}  // namespace moh

// `route`: from tokens and the weight of a router's linear layer to gates, statistics and the list of pairs that run.
//
// A task is a block of tokens. It multiplies them by the weight; then LANES tokens at a time are the lanes of softmax,
// ranking and gates, so that nothing there works on rows as short as the number of heads. A second pass over the
// sequences makes the list. routers/moh.py has the equations of the gates.
#include "brgemm.h"
#include "lists.h"

#include <string_view>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace moh {
namespace {

using at::Tensor;
using std::optional;

constexpr int64_t BLOCK = 48;        // tokens of a task: whole vectors, whole tiles of `multiply` and of AMX
constexpr int64_t TERMS = 256;       // tokens that the gradient of the weight sums at once: they stay in cache
constexpr int64_t COLUMNS = 64;      // of the weight, a task of its gradient
constexpr int64_t SERIAL = 1 << 16;  // one thread lists so many (token, head)
constexpr float SMALLEST_GATE = 1e-30f;

enum class Kind { RELEASED, PAPER, RENORMALISED };

// What a router computes. The rows of its weight are the candidates, the shared heads, and two for their balance.
struct Router {
  int64_t candidates, shared, routed;  // E, S, k
  Kind kind;
  int64_t rows;  // R
  bool balance;

  int64_t heads() const { return shared + candidates; }
  bool two_groups() const { return shared > 0 && candidates > 0; }
  bool divides() const {  // whether gates are divided by the sum of the selected probabilities
    return kind == Kind::RENORMALISED || (kind == Kind::RELEASED && routed < candidates);
  }

  Router(int64_t candidates, int64_t shared, int64_t routed, std::string_view kind, int64_t rows)
      : candidates(candidates), shared(shared), routed(routed), rows(rows) {
    TORCH_CHECK_VALUE(kind == "released" || kind == "paper" || kind == "renormalised", "route: no kind '", kind, "'");
    this->kind = kind == "released" ? Kind::RELEASED : kind == "paper" ? Kind::PAPER : Kind::RENORMALISED;
    TORCH_CHECK_VALUE(
        candidates >= 0 && shared >= 0 && routed >= 0 && routed <= candidates && shared + candidates > 0 &&
            (routed > 0 || candidates == 0) && (shared == 0 || this->kind != Kind::RENORMALISED),
        "route: ", candidates, " candidates, ", shared, " shared and ", routed, " routed heads, kind ", kind);
    const int64_t plain = candidates + (shared > 1 ? shared : 0);
    balance = two_groups() && rows == plain + 2;
    TORCH_CHECK_VALUE(rows == plain || balance, "route: a weight of ", rows, " rows for ", candidates,
                      " candidates and ", shared, " shared heads");
  }
};

// What is computed for LANES tokens. Number (row, token) lies at [row * LANES + token].
struct Lanes {
  std::vector<float> logits;           // [R]
  std::vector<float> probs;            // [E] softmax over the candidates
  std::vector<float> shared_probs;     // [S] softmax over the shared heads
  std::vector<int32_t> active;         // [H] 1 where a head runs
  std::vector<float> gates;            // [H]
  std::vector<float> transposed;       // [LANES, padded(max(R, H))]
  Vec alpha[2];                        // how the groups of shared and routed heads are balanced
  Vec shared_factor, routed_factor;    // gate = softmax or probability times the group's factor
  Vec selected_sum;                    // of the selected probabilities

  explicit Lanes(const Router& router)
      : logits(router.rows * LANES),
        probs(router.candidates * LANES),
        shared_probs(router.shared * LANES),
        active(router.heads() * LANES),
        gates(router.heads() * LANES),
        transposed(padded(std::max(router.rows, router.heads())) * LANES) {}
};

// Softmax over `count` rows. A row of NaN makes all NaN, as in PyTorch.
void softmax(const float* logits, int64_t count, float* probs) {
  Vec largest = broadcast(-std::numeric_limits<float>::infinity()), sum{};
  for (int64_t e = 0; e < count; e++) largest = maximum(load(logits + e * LANES), largest);
  for (int64_t e = 0; e < count; e++) {
    const Vec p = exponential(load(logits + e * LANES) - largest);
    store(probs + e * LANES, p);
    sum += p;
  }
  for (int64_t e = 0; e < count; e++) store(probs + e * LANES, load(probs + e * LANES) / sum);
}

// chosen = 1 for the k largest logits of each token. Among equal ones the lower index wins, NaN counts as -inf: so
// "beats" is an order, and exactly k rows are beaten by fewer than k.
void choose(const float* logits, int64_t count, int64_t k, int32_t* chosen) {
  const auto score = [&](int64_t e) {
    const Vec v = load(logits + e * LANES);
    return v == v ? v : broadcast(-std::numeric_limits<float>::infinity());
  };
  for (int64_t later = 0; later < count; later++) {  // here `chosen` counts by how many each is beaten
    const Vec own = score(later);
    IntVec beaten = IntVec{} + static_cast<int32_t>(later);
    for (int64_t e = 0; e < later; e++) {
      const IntVec larger = own > score(e);  // -1 where true
      beaten += larger;
      store(chosen + e * LANES, load(chosen + e * LANES) - larger);
    }
    store(chosen + later * LANES, beaten);
  }
  for (int64_t e = 0; e < count; e++) {
    const IntVec beaten = load(chosen + e * LANES);
    store(chosen + e * LANES, -(beaten < static_cast<int32_t>(k)));  // true is -1
  }
}

// Probabilities, choice and gates of LANES tokens from their logits.
void gate(const Router& router, Lanes& lanes) {
  const int64_t E = router.candidates, S = router.shared;
  softmax(lanes.logits.data(), E, lanes.probs.data());
  int32_t* chosen = lanes.active.data() + S * LANES;
  std::fill(lanes.active.data(), chosen, 1);
  choose(lanes.logits.data(), E, router.routed, chosen);

  lanes.alpha[0] = lanes.alpha[1] = broadcast(router.two_groups() ? 0.5f : 1.f);
  if (router.balance) {
    float alpha[2 * LANES];
    softmax(lanes.logits.data() + (router.rows - 2) * LANES, 2, alpha);
    lanes.alpha[0] = load(alpha);
    lanes.alpha[1] = load(alpha + LANES);
  }
  lanes.shared_factor = lanes.alpha[0];
  lanes.routed_factor = lanes.alpha[1];
  if (router.kind == Kind::RELEASED) {
    const float groups = router.two_groups() ? 2.f : 1.f;
    lanes.shared_factor = broadcast(S) * (broadcast(groups) * lanes.shared_factor);
    lanes.routed_factor = broadcast(router.routed) * (broadcast(groups) * lanes.routed_factor);
  }

  if (S == 1) {
    store(lanes.shared_probs.data(), broadcast(1.f));
  } else {
    softmax(lanes.logits.data() + E * LANES, S, lanes.shared_probs.data());
  }
  for (int64_t s = 0; s < S; s++)
    store(lanes.gates.data() + s * LANES, load(lanes.shared_probs.data() + s * LANES) * lanes.shared_factor);

  Vec sum{};
  for (int64_t e = 0; e < E; e++) sum += load(chosen + e * LANES) > 0 ? load(lanes.probs.data() + e * LANES) : Vec{};
  lanes.selected_sum = sum;
  if (router.divides()) lanes.routed_factor /= sum;
  for (int64_t e = 0; e < E; e++) {
    const Vec p = load(lanes.probs.data() + e * LANES);
    const Vec g = router.kind == Kind::RENORMALISED ? p / sum : p * lanes.routed_factor;  // p / p is exactly 1
    store(lanes.gates.data() + (S + e) * LANES, load(chosen + e * LANES) > 0 ? g : Vec{});
  }
  // Products with denormal numbers would slow all that follows.
  for (int64_t h = 0; h < router.heads(); h++) {
    float* g = lanes.gates.data() + h * LANES;
    store(g, load(g) < broadcast(SMALLEST_GATE) ? Vec{} : load(g));
  }
}

// Rows of a matrix [tokens, width] into lanes, and back. `count` tokens; lanes beyond them are 0.
void to_lanes(const float* rows, int64_t stride, int64_t count, int64_t width, float* lanes) {
  transpose({rows, stride}, count, width, lanes, LANES);
}

// Whole vectors are stored where they fit before `end`, the end of the task's tokens. What a row writes too much, the
// next one overwrites.
template <class T, class Store, class StorePart>
MOH_INLINE void copy_rows(const float* transposed, int64_t stride, int64_t count, int64_t width, T* to, T* end,
                          const Store& whole, const StorePart& part) {
  for (int64_t t = 0; t < count; t++, to += width)
    for (int64_t c = 0; c < width; c += LANES) {
      const Vec v = load(transposed + t * stride + c);
      if (to + c + LANES <= end)
        whole(to + c, v);
      else
        part(to + c, v, std::min<int64_t>(LANES, width - c));
    }
}

void from_lanes(const float* lanes, int64_t count, int64_t width, float* scratch, float* to, float* end) {
  const int64_t stride = padded(width);
  transpose({lanes, LANES}, width, LANES, scratch, stride);
  copy_rows(scratch, stride, count, width, to, end, [](float* p, Vec v) { store(p, v); }, store_part);
}

void from_lanes(const int32_t* lanes, int64_t count, int64_t width, float* scratch, bool* to, bool* end) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
  const int64_t stride = padded(width);
  // Only moved: a bit pattern is as good as a number.
  transpose({reinterpret_cast<const float*>(lanes), LANES}, width, LANES, scratch, stride);
  const auto part = [](bool* p, Vec v, int64_t size) {
    const Bytes bytes = __builtin_convertvector((IntVec)v, Bytes);
    std::memcpy(p, &bytes, size);
  };
  copy_rows(scratch, stride, count, width, to, end, [&](bool* p, Vec v) { part(p, v, LANES); }, part);
}

// Writes 0 where a token is padding.
void clear_padding(const bool* padding, int64_t count, int64_t width, float* lanes) {
  IntVec pads{};
  for (int64_t t = 0; t < count; t++) pads[t] = padding[t];
  for (int64_t i = 0; i < width; i++) store(lanes + i * LANES, pads > 0 ? Vec{} : load(lanes + i * LANES));
}

// ---- logits

Tensor flat_tokens(const Tensor& x) {
  const Tensor flat = x.reshape({x.size(0) * x.size(1), x.size(2)});
  return flat.stride(1) == 1 && flat.stride(0) >= flat.size(1) ? flat : flat.contiguous();
}

MOH_INLINE Vec widen(const at::BFloat16* p) {
  typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
  return (Vec)(__builtin_convertvector(*reinterpret_cast<const Halves*>(p), IntVec) << 16);
}

MOH_INLINE Vec widen(const at::Half* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec v{};
  for (int i = 0; i < LANES; i++) v[i] = p[i];
  return v;
#endif
}

template <class T>
void to_float(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, widen(from + i));
  for (; i < count; i++) to[i] = from[i];
}

// Logits of blocks of tokens in float32, on the vectors of the processor.
template <class T>
struct FloatLogits {
  std::vector<float> weight;  // [C, width]
  int64_t C, width;
  struct Scratch {
    std::vector<float> tokens;
  };

  FloatLogits(const Tensor& w) : C(w.size(1)), width(padded(w.size(0))) {
    weight.resize(C * width);
    const Tensor rows = w.to(at::kFloat).contiguous();
    transpose({rows.const_data_ptr<float>(), C}, w.size(0), C, weight.data(), width);
  }
  Scratch scratch() const { return {std::vector<float>(std::is_same_v<T, float> ? 0 : BLOCK * C)}; }
  void block(const T* x, int64_t stride, int64_t count, Scratch& scratch, float* logits) const {
    Rows tokens{};
    if constexpr (std::is_same_v<T, float>) {
      tokens = {x, stride};
    } else {
      for (int64_t t = 0; t < count; t++) to_float(x + t * stride, scratch.tokens.data() + t * C, C);
      tokens = {scratch.tokens.data(), C};
    }
    multiply(tokens, count, {weight.data(), width}, C, {logits, width}, width, false);
  }
  static void release() {}
};

// The same on the matrix unit, by libtorch's brgemm: tokens and weight of the same 16-bit type, sums in float32.
template <class T>
struct ShortLogits {
  std::vector<T> weight;  // [C / 2, width, 2]: pairs of neighbouring columns lie side by side
  int64_t C, width;
  struct Scratch {
    std::vector<T> tokens;
  };

  ShortLogits(const Tensor& w) : C(w.size(1)), width(padded(w.size(0))) {
    weight.resize(C * width);
    const Tensor rows = w.contiguous();
    const auto from = reinterpret_cast<const float*>(rows.const_data_ptr<T>());  // a pair moves like a float32
    transpose({from, C / 2}, w.size(0), C / 2, reinterpret_cast<float*>(weight.data()), width);
  }
  Scratch scratch() const { return {std::vector<T>(BLOCK * C, T(0))}; }
  void block(const T* x, int64_t stride, int64_t count, Scratch& scratch, float* logits) const {
    if (count < BLOCK) {  // every number of rows would be compiled anew
      for (int64_t t = 0; t < count; t++) std::copy(x + t * stride, x + t * stride + C, scratch.tokens.data() + t * C);
      x = scratch.tokens.data();
      stride = C;
    }
    at::native::cpublas::brgemm(BLOCK, width, C, stride, width, width, false, x, weight.data(), logits);
  }
  static void release() { at::native::cpublas::brgemm_release(); }
};

struct Outputs {
  float *weights, *rows, *probs;
  bool* active;
};

template <class T, class Logits>
void route_tokens(
    const Router& router, const Tensor& x, const Tensor& weight, const bool* padding, const Outputs& out) {
  const Logits product(weight);
  const int64_t tokens = x.size(0), H = router.heads(), E = router.candidates, R = router.rows;
  struct Scratch {
    typename Logits::Scratch product;
    Lanes lanes;
    std::vector<float> logits;
    ~Scratch() { Logits::release(); }
  };
  const auto make = [&] {
    return Scratch{product.scratch(), Lanes(router), std::vector<float>(BLOCK * product.width)};
  };
  for_each_task(ceil_div(tokens, BLOCK), make, [&](int64_t task, Scratch& s) {
    const int64_t first = task * BLOCK, end = std::min(first + BLOCK, tokens);
    product.block(x.const_data_ptr<T>() + first * x.stride(0), x.stride(0), end - first, s.product, s.logits.data());
    for (int64_t t = first; t < end; t += LANES) {
      const int64_t count = std::min<int64_t>(LANES, end - t);
      to_lanes(s.logits.data() + (t - first) * product.width, product.width, count, R, s.lanes.logits.data());
      gate(router, s.lanes);
      if (padding) clear_padding(padding + t, count, E, s.lanes.probs.data());
      float* scratch = s.lanes.transposed.data();
      from_lanes(s.lanes.logits.data(), count, R, scratch, out.rows + t * R, out.rows + end * R);
      from_lanes(s.lanes.probs.data(), count, E, scratch, out.probs + t * E, out.probs + end * E);
      from_lanes(s.lanes.gates.data(), count, H, scratch, out.weights + t * H, out.weights + end * H);
      from_lanes(s.lanes.active.data(), count, H, scratch, out.active + t * H, out.active + end * H);
    }
  });
}

// ---- gradients

// Gradients of LANES tokens: those that come, and those of the logits.
struct LaneGradients {
  std::vector<float> weights, probs, rows;  // [H], [E], [R]; `rows` begins as it comes and is added to

  explicit LaneGradients(const Router& router)
      : weights(router.heads() * LANES), probs(router.candidates * LANES), rows(router.rows * LANES) {}
};

// Adds to grad.rows what comes through gates and probabilities; `lanes` is as `gate` left it.
void gate_backward(const Router& router, const Lanes& lanes, LaneGradients& grad) {
  const int64_t E = router.candidates, S = router.shared;
  const auto add = [&](int64_t row, Vec v) {
    float* to = grad.rows.data() + row * LANES;
    store(to, load(to) + v);
  };

  const int32_t* chosen = lanes.active.data() + S * LANES;
  const float* routed_grad = grad.weights.data() + S * LANES;
  const auto prob = [&](int64_t e) { return load(lanes.probs.data() + e * LANES); };
  const auto selected = [&](int64_t e, Vec v) { return load(chosen + e * LANES) > 0 ? v : Vec{}; };
  Vec product{};
  for (int64_t e = 0; e < E; e++) product += selected(e, load(routed_grad + e * LANES) * prob(e));
  // The sum of the selected probabilities has a gradient too, except MoA's, which is detached.
  const bool through_sum = router.kind == Kind::RELEASED && router.divides();
  const Vec mean = through_sum ? product / lanes.selected_sum : Vec{};
  // One selected head has the gate p / p, whose gradient is exactly 0; rounding would be scaled to whole steps by Adam.
  const bool constant = through_sum && router.routed == 1;
  const auto prob_grad = [&](int64_t e) {
    const Vec through_gate = constant ? Vec{} : lanes.routed_factor * (load(routed_grad + e * LANES) - mean);
    return load(grad.probs.data() + e * LANES) + selected(e, through_gate);
  };
  Vec total{};
  for (int64_t e = 0; e < E; e++) total += prob(e) * prob_grad(e);
  for (int64_t e = 0; e < E; e++) add(e, prob(e) * (prob_grad(e) - total));

  Vec shared_product{};
  const auto shared_prob = [&](int64_t s) { return load(lanes.shared_probs.data() + s * LANES); };
  const auto shared_grad = [&](int64_t s) { return load(grad.weights.data() + s * LANES); };
  for (int64_t s = 0; s < S; s++) shared_product += shared_grad(s) * shared_prob(s);
  if (S > 1)
    for (int64_t s = 0; s < S; s++)
      add(E + s, lanes.shared_factor * shared_prob(s) * (shared_grad(s) - shared_product));

  if (router.balance) {
    const Vec shared = lanes.shared_factor * shared_product, routed = lanes.routed_factor * product;
    add(router.rows - 2, shared - lanes.alpha[0] * (shared + routed));
    add(router.rows - 1, routed - lanes.alpha[1] * (shared + routed));
  }
}

Rows rows_of(const Tensor&&) = delete;  // see HeadRows
Rows rows_of(const Tensor& matrix) { return {matrix.const_data_ptr<float>(), matrix.stride(0)}; }

// dweight [R, C] = drows^T x, a task for every COLUMNS columns.
void weight_gradient(const Rows& drows, int64_t R, const Rows& x, int64_t tokens, int64_t C, float* dweight) {
  for_each_task(ceil_div(C, COLUMNS), [] { return 0; }, [&](int64_t task, int) {
    const int64_t column = task * COLUMNS, width = std::min(COLUMNS, C - column);
    for (int64_t t = 0; t < tokens; t += TERMS)
      multiply<Left::COLUMNS>(
          drows.from(t), R, x.from(t, column), std::min(TERMS, tokens - t), {dweight + column, C}, width, t > 0);
  });
}

// ---- the list of pairs

// Pairs that run, sorted by head, then sequence, then token; active [B, N, H].
std::tuple<Tensor, Tensor> list_pairs(const Tensor& active) {
  const int64_t B = active.size(0), N = active.size(1), H = active.size(2);
  TORCH_CHECK_VALUE(B * N < std::numeric_limits<int32_t>::max(), "pairs: too many tokens for int32");
  const Tensor offsets = at::empty({H * B + 1}, active.options().dtype(at::kInt));
  int32_t* offset = offsets.mutable_data_ptr<int32_t>();
  const bool* runs = active.const_data_ptr<bool>();

  // A token is written where the next one of its head goes, and stays there if the head runs. That needs no branch, but
  // room for one more.
  const int64_t room = N + 1;
  std::vector<int32_t> lists(B * H * room), counts(B * H);
  const auto each_sequence = [&](const auto& task) {
    if (active.numel() > SERIAL)
      for_each_task(B, [] { return 0; }, [&](int64_t b, int) { task(b); });
    else  // to wake a second thread takes as long
      for (int64_t b = 0; b < B; b++) task(b);
  };
  each_sequence([&](int64_t b) {
    int32_t* list = lists.data() + b * H * room;
    int32_t* count = counts.data() + b * H;
    for (int64_t t = b * N; t < (b + 1) * N; t++)
      for (int64_t h = 0; h < H; h++) {
        list[h * room + count[h]] = static_cast<int32_t>(t);
        count[h] += runs[t * H + h];
      }
  });
  offset[0] = 0;
  for (int64_t h = 0; h < H; h++)
    for (int64_t b = 0; b < B; b++) offset[h * B + b + 1] = offset[h * B + b] + counts[b * H + h];
  const Tensor token = at::empty({offset[H * B]}, offsets.options());
  int32_t* to = token.mutable_data_ptr<int32_t>();
  each_sequence([&](int64_t b) {
    for (int64_t h = 0; h < H; h++)
      std::copy_n(lists.data() + (b * H + h) * room, counts[b * H + h], to + offset[h * B + b]);
  });
  return {token, offsets};
}

std::tuple<Tensor, Tensor> pairs(const Tensor& active) {
  TORCH_CHECK_VALUE(active.dim() == 3 && active.scalar_type() == at::kBool, "pairs: active must be bool [B, N, H]");
  return list_pairs(active.contiguous());
}

// Tokens of each sequence that run each head, those at padding left out: [B, H].
void count_tokens(const Tensor& active, const Tensor& offsets, const bool* padding, float* counts) {
  const int64_t B = active.size(0), N = active.size(1), H = active.size(2);
  const int32_t* offset = offsets.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++) counts[b * H + h] = offset[h * B + b + 1] - offset[h * B + b];
  if (!padding) return;
  const bool* runs = active.const_data_ptr<bool>();
  for (int64_t t = 0; t < B * N; t++)
    if (padding[t])
      for (int64_t h = 0; h < H; h++) counts[t / N * H + h] -= runs[t * H + h];
}

// ---- the operator

void check(const Tensor& x, const Tensor& weight, const optional<Tensor>& padding) {
  for (const at::ScalarType type : {x.scalar_type(), weight.scalar_type()})
    TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
                      "route: float32, bfloat16 or float16, not ", type);
  TORCH_CHECK_VALUE(x.dim() == 3 && weight.dim() == 2 && weight.size(1) == x.size(2),
                    "route: x ", x.sizes(), ", weight ", weight.sizes());
  if (padding)
    TORCH_CHECK_VALUE(padding->scalar_type() == at::kBool && padding->sizes() == x.sizes().slice(0, 2),
                      "route: padding must be bool [B, N]");
}

template <class T>
void route_typed(const Router& router, const Tensor& x, const Tensor& weight, const bool* padding, const Outputs& out) {
  if constexpr (!std::is_same_v<T, float>) {
    const bool fits = weight.scalar_type() == x.scalar_type() && x.size(1) % 2 == 0 && router.rows > 0;
    if (fits && brgemm_available(x.scalar_type()))
      return route_tokens<T, ShortLogits<T>>(router, x, weight, padding, out);
  }
  route_tokens<T, FloatLogits<T>>(router, x, weight, padding, out);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> route(
    const Tensor& x, const Tensor& weight, int64_t candidates, int64_t shared, int64_t routed, std::string_view kind,
    const optional<Tensor>& padding) {
  check(x, weight, padding);
  const Router router(candidates, shared, routed, kind, weight.size(0));
  const int64_t B = x.size(0), N = x.size(1), H = router.heads();
  const auto options = x.options().dtype(at::kFloat);
  const Tensor weights = at::empty({B, N, H}, options), rows = at::empty({B, N, router.rows}, options);
  const Tensor probs = at::empty({B, N, candidates}, options), counts = at::empty({B, H}, options);
  const Tensor active = at::empty({B, N, H}, options.dtype(at::kBool));

  const Tensor tokens = flat_tokens(x), padded_tokens = padding ? padding->contiguous() : Tensor();
  const bool* pads = padding ? padded_tokens.const_data_ptr<bool>() : nullptr;
  const Outputs out{weights.mutable_data_ptr<float>(), rows.mutable_data_ptr<float>(), probs.mutable_data_ptr<float>(),
                    active.mutable_data_ptr<bool>()};
  switch (x.scalar_type()) {
    case at::kFloat: route_typed<float>(router, tokens, weight, pads, out); break;
    case at::kBFloat16: route_typed<at::BFloat16>(router, tokens, weight, pads, out); break;
    default: route_typed<at::Half>(router, tokens, weight, pads, out);
  }
  const auto [token, offsets] = list_pairs(active);
  count_tokens(active, offsets, pads, counts.mutable_data_ptr<float>());
  return {weights, active, rows, probs, counts, token, offsets};
}

// Gates are computed again from `rows`, the logits. x and weight are only needed for the last two products.
std::tuple<Tensor, Tensor> route_backward(
    const optional<Tensor>& dweights, const optional<Tensor>& dprobs, const optional<Tensor>& drows, const Tensor& rows,
    const Tensor& x, const Tensor& weight, int64_t candidates, int64_t shared, int64_t routed, std::string_view kind,
    const optional<Tensor>& padding) {
  check(x, weight, padding);
  const Router router(candidates, shared, routed, kind, weight.size(0));
  const int64_t tokens = x.size(0) * x.size(1), C = x.size(2), R = router.rows, E = candidates, H = router.heads();
  const auto check_numbers = [&](const optional<Tensor>& t, const char* name, int64_t width) {
    TORCH_CHECK_VALUE(!t || t->numel() == tokens * width, "route_backward: ", name, " is ", t->sizes(), ", not ", width,
                      " numbers for each of ", tokens, " tokens");
  };
  check_numbers(dweights, "dweights", H);
  check_numbers(dprobs, "dprobs", E);
  check_numbers(drows, "drows", R);
  check_numbers(rows, "rows", R);
  const auto as_rows = [](const optional<Tensor>& t) { return t ? t->to(at::kFloat).contiguous() : Tensor(); };
  const Tensor own_dweights = as_rows(dweights), own_dprobs = as_rows(dprobs), own_drows = as_rows(drows);
  const Tensor own_rows = as_rows(rows), pads = padding ? padding->contiguous() : Tensor();
  const auto fill = [&](const Tensor& t, int64_t first, int64_t count, int64_t width, std::vector<float>& lanes) {
    if (t.defined()) to_lanes(t.const_data_ptr<float>() + first * width, width, count, width, lanes.data());
    else std::fill(lanes.begin(), lanes.end(), 0.f);
  };

  const Tensor all = at::empty({tokens, R}, own_rows.options());  // gradients of the logits
  const Tensor dx = at::empty(x.sizes(), own_rows.options()), dweight = at::zeros(weight.sizes(), own_rows.options());
  const Tensor w = with_room(weight), flat = with_room(flat_tokens(x));
  float* all_data = all.mutable_data_ptr<float>();
  float* dx_data = dx.mutable_data_ptr<float>();

  struct Scratch {
    Lanes lanes;
    LaneGradients grad;
  };
  const auto make = [&] { return Scratch{Lanes(router), LaneGradients(router)}; };
  for_each_task(ceil_div(tokens, BLOCK), make, [&](int64_t task, Scratch& s) {
    const int64_t first = task * BLOCK, end = std::min(first + BLOCK, tokens);
    for (int64_t t = first; t < end; t += LANES) {
      const int64_t count = std::min<int64_t>(LANES, end - t);
      fill(own_rows, t, count, R, s.lanes.logits);
      gate(router, s.lanes);
      fill(own_dweights, t, count, H, s.grad.weights);
      fill(own_dprobs, t, count, E, s.grad.probs);
      fill(own_drows, t, count, R, s.grad.rows);
      if (padding) clear_padding(pads.const_data_ptr<bool>() + t, count, E, s.grad.probs.data());
      gate_backward(router, s.lanes, s.grad);
      from_lanes(s.grad.rows.data(), count, R, s.lanes.transposed.data(), all_data + t * R, all_data + end * R);
    }
    multiply({all_data + first * R, R}, end - first, rows_of(w), R, {dx_data + first * C, C}, C, false);
  });
  weight_gradient(rows_of(all), R, rows_of(flat), tokens, C, dweight.mutable_data_ptr<float>());
  return {dx.to(x.scalar_type()), dweight.to(weight.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(moh_vision, m) {
  m.def(
      "route(Tensor x, Tensor weight, int candidates, int shared, int routed, str kind, Tensor? padding) -> "
      "(Tensor weights, Tensor active, Tensor rows, Tensor probs, Tensor counts, Tensor token, Tensor offsets)");
  m.def(
      "route_backward(Tensor? dweights, Tensor? dprobs, Tensor? drows, Tensor rows, Tensor x, Tensor weight, "
      "int candidates, int shared, int routed, str kind, Tensor? padding) -> (Tensor dx, Tensor dweight)");
  m.def("pairs(Tensor active) -> (Tensor token, Tensor offsets)");
}

TORCH_LIBRARY_IMPL(moh_vision, CPU, m) {
  m.impl("route", &route);
  m.impl("route_backward", &route_backward);
  m.impl("pairs", &pairs);
}

}  // namespace moh

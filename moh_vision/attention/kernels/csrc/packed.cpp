// `project`, `attend` and `combine` in float32: of the (head, sequence, token) pairs that run, and nothing else.
//
// Rows of tokens are read and written where they lie, through the list; nothing is gathered or padded. Each number is
// summed by one task, in an order that shapes alone decide: threads change no bit. attend16.cpp has 16 bits.

#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "lists.h"

namespace moh {
namespace {

constexpr int64_t PIECE = 96;     // pairs in a task of a projection
constexpr int64_t TERMS = 128;    // pairs of a weight gradient that are summed at a time: both operands stay in L1
constexpr int64_t COLUMNS = 192;  // columns in a task of a weight gradient
constexpr int64_t BLOCK = 64;     // tokens in a task that adds up the heads of a token
constexpr int64_t QUERIES = 64;   // in a tile of attention; they are the lanes of its vectors
constexpr int64_t KEYS = 512;     // in a tile of attention
constexpr int64_t KEY_RANGE = 1024, MOST_RANGES = 8;  // keys in a task of attention's backward; tasks hold gradients

struct NoScratch {};
NoScratch no_scratch() { return {}; }
using Floats = std::vector<float>;

void check_float(const Tensor& x, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, name, " is ", x.scalar_type(), ", not float32");
}

void check_rows(const Tensor& x, const char* name, int64_t rows, int64_t width) {
  TORCH_CHECK(x.dim() == 2 && x.size(0) == rows && x.size(1) == width, name, " is ", x.sizes(), ", not [", rows, ", ",
              width, "]");
}

// Weights of every head as [H][rows][padded columns], so that `multiply` reads them as its right matrix: `cut(h)` gives
// head h of the parameter, `turned` whether its rows become columns.
template <class Cut>
Tensor pack_weights(const Tensor& like, int64_t H, int64_t rows, int64_t columns, bool turned, const Cut& cut) {
  const int64_t stride = padded(columns);
  Tensor packed = at::empty({H, rows, stride}, like.options());
  float* to = packed.data_ptr<float>();
  for_each_task(H, no_scratch, [&](int64_t h, NoScratch&) {
    const Rows from = cut(h);
    float* target = to + h * rows * stride;
    if (turned) return transpose(from, columns, rows, target, stride);
    for (int64_t r = 0; r < rows; r++) {
      std::memcpy(target + r * stride, from.row(r), columns * sizeof(float));
      std::fill(target + r * stride + columns, target + (r + 1) * stride, 0.f);
    }
  });
  return packed;
}

// y[token] += sum over its heads of gate * row * W_h, for row = row of the pair [D], W_h [D, C]; y holds what it begins with.
// `gates` [T, H], or null: 1.
void add_heads(const Pairs& pairs, int64_t H, const float* rows, int64_t D, const float* gates, const float* weights,
               int64_t weight_stride, float* y, int64_t T, int64_t C) {
  if (T == 0) return;
  const int64_t B = pairs.segments / H, N = T / B, blocks = ceil_div(N, BLOCK);
  const auto scratch = [&] { return Floats(BLOCK * D); };
  for_each_task(B * blocks, scratch, [&](int64_t task, Floats& gated) {
    const int64_t b = task / blocks, first = b * N + task % blocks * BLOCK, last = std::min(first + BLOCK, (b + 1) * N);
    for (int64_t h = 0; h < H; h++) {
      const int64_t s = h * B + b;
      const int32_t* from = std::lower_bound(pairs.token + pairs.begin(s), pairs.token + pairs.end(s), first);
      const int32_t* to = std::lower_bound(from, pairs.token + pairs.end(s), last);
      const int64_t p = from - pairs.token, count = to - from;
      if (count == 0) continue;
      Rows left{rows + p * D, D};
      if (gates) {
        for (int64_t i = 0; i < count; i++) {
          const float gate = gates[from[i] * H + h];
          for (int64_t d = 0; d < D; d++) gated[i * D + d] = gate * rows[(p + i) * D + d];
        }
        left = Rows{gated.data(), D};
      }
      multiply(left, count, Rows{weights + h * D * weight_stride, weight_stride}, D, Target{y, C, from}, C, true);
    }
  });
}

// ---- project

void check_project(const Tensor& x, const Tensor& weight, int64_t H) {
  check_float(x, "x");
  check_float(weight, "weight");
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && weight.size(1) == x.size(1) && H > 0 && weight.size(0) % H == 0,
              "x ", x.sizes(), " and weight ", weight.sizes(), " are not [T, C] and [H * D, C] of ", H, " heads");
}

Tensor project(const Tensor& x_, const Tensor& weight_, const std::optional<Tensor>& bias, const Tensor& token,
               const Tensor& offsets, int64_t H) {
  check_project(x_, weight_, H);
  TORCH_CHECK(!bias || bias->numel() == weight_.size(0), "bias has ", bias->numel(), " numbers, not ", weight_.size(0));
  const Tensor x = x_.contiguous(), weight = weight_.contiguous();
  const Pairs pairs = pairs_of_rows(token, offsets, H, x.size(0));
  const int64_t C = x.size(1), D = weight.size(0) / H, B = pairs.segments / H;
  Tensor q = at::empty({pairs.count, D}, x.options());
  const float *from = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  float* to = q.data_ptr<float>();
  const Tensor bias_rows = bias ? bias->contiguous() : Tensor();
  const float* shift = bias ? bias_rows.const_data_ptr<float>() : nullptr;

  const Tensor packed = pack_weights(x, H, C, D, true, [&](int64_t h) { return Rows{w + h * D * C, C}; });
  const float* right = packed.const_data_ptr<float>();
  const auto tasks = pieces(pairs, B, PIECE);
  for_each_task(tasks.size(), no_scratch, [&](int64_t task, NoScratch&) {
    const auto [h, begin, end] = tasks[task];
    if (shift)
      for (int64_t p = begin; p < end; p++) std::memcpy(to + p * D, shift + h * D, D * sizeof(float));
    multiply(Rows{from, C, pairs.token + begin}, end - begin, Rows{right + h * C * padded(D), padded(D)}, C,
             Target{to + begin * D, D}, D, shift != nullptr);
  });
  return q;
}

std::tuple<Tensor, Tensor, Tensor> project_backward(const Tensor& grad_, const Tensor& x_, const Tensor& weight_,
                                                    const Tensor& token, const Tensor& offsets, int64_t H) {
  check_project(x_, weight_, H);
  check_rows(grad_, "grad", token.numel(), weight_.size(0) / H);
  const Tensor grad = grad_.contiguous(), x = with_room(x_.contiguous()), weight = with_room(weight_.contiguous());
  const Pairs pairs = pairs_of_rows(token, offsets, H, x.size(0));
  const int64_t T = x.size(0), C = x.size(1), D = weight.size(0) / H, B = pairs.segments / H;
  Tensor dx = at::zeros({T, C}, x.options()), dweight = at::zeros({H * D, C}, x.options());
  Tensor dbias = at::zeros({H * D}, x.options());
  const float *dq = grad.const_data_ptr<float>(), *tokens = x.const_data_ptr<float>();
  float *dw = dweight.data_ptr<float>(), *db = dbias.data_ptr<float>();

  add_heads(pairs, H, dq, D, nullptr, weight.const_data_ptr<float>(), C, dx.data_ptr<float>(), T, C);

  const int64_t parts = ceil_div(C, COLUMNS);
  for_each_task(H * parts, no_scratch, [&](int64_t task, NoScratch&) {
    const int64_t h = task / parts, column = task % parts * COLUMNS, columns = std::min(COLUMNS, C - column);
    for (int64_t p = pairs.begin(h * B); p < pairs.end(h * B + B - 1); p += TERMS) {
      const int64_t terms = std::min(TERMS, pairs.end(h * B + B - 1) - p);
      multiply<Left::COLUMNS>(Rows{dq + p * D, D}, D, Rows{tokens + column, C, pairs.token + p}, terms,
                              Target{dw + h * D * C + column, C}, columns, true);
      if (column == 0)
        for (int64_t i = p; i < p + terms; i++)
          for (int64_t d = 0; d < D; d++) db[h * D + d] += dq[i * D + d];
    }
  });
  return {dx, dweight, dbias};
}

// ---- combine

void check_combine(const Tensor& o, const Tensor& gates, const Tensor& weight, const Tensor& token, int64_t H) {
  check_float(o, "o");
  check_float(gates, "weights");
  check_float(weight, "weight");
  TORCH_CHECK(o.dim() == 2 && weight.dim() == 2 && gates.dim() == 2 && gates.size(1) == H &&
                  weight.size(1) == H * o.size(1) && o.size(0) == token.numel(),
              "o ", o.sizes(), ", weights ", gates.sizes(), " and weight ", weight.sizes(),
              " are not [P, D], [T, H] and [C, H * D] of ", H, " heads and ", token.numel(), " pairs");
}

Tensor combine(const Tensor& o_, const Tensor& gates_, const Tensor& weight_, const std::optional<Tensor>& bias,
               const Tensor& token, const Tensor& offsets, int64_t H) {
  check_combine(o_, gates_, weight_, token, H);
  TORCH_CHECK(!bias || bias->numel() == weight_.size(0), "bias has ", bias->numel(), " numbers, not ", weight_.size(0));
  const Tensor o = o_.contiguous(), gates = gates_.contiguous(), weight = weight_.contiguous();
  const Pairs pairs = pairs_of_rows(token, offsets, H, gates.size(0));
  const int64_t T = gates.size(0), C = weight.size(0), D = o.size(1);
  const float* w = weight.const_data_ptr<float>();
  const Tensor packed = pack_weights(o, H, D, C, true, [&](int64_t h) { return Rows{w + h * D, H * D}; });
  Tensor y = at::zeros({T, C}, o.options());  // never the memory of the bias itself
  if (bias) y.copy_(bias->expand({T, C}));
  add_heads(pairs, H, o.const_data_ptr<float>(), D, gates.const_data_ptr<float>(), packed.const_data_ptr<float>(),
            padded(C), y.data_ptr<float>(), T, C);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> combine_backward(const Tensor& grad_, const Tensor& o_, const Tensor& gates_,
                                                    const Tensor& weight_, const Tensor& token, const Tensor& offsets,
                                                    int64_t H) {
  check_combine(o_, gates_, weight_, token, H);
  check_rows(grad_, "grad", gates_.size(0), weight_.size(0));
  const Tensor grad = grad_.contiguous(), o = o_.contiguous(), gates = gates_.contiguous();
  const Tensor weight = weight_.contiguous();
  const Pairs pairs = pairs_of_rows(token, offsets, H, gates.size(0));
  const int64_t C = weight.size(0), D = o.size(1), B = pairs.segments / H, width = padded(D);
  Tensor dout = at::empty({pairs.count, D}, o.options()), dgates = at::zeros(gates.sizes(), gates.options());
  Tensor dweight = at::zeros({C, H * D}, o.options()), gated = at::empty({pairs.count, width}, o.options());
  const float *dy = grad.const_data_ptr<float>(), *out = o.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  const float* gate = gates.const_data_ptr<float>();
  float *d_o = dout.data_ptr<float>(), *dg = dgates.data_ptr<float>(), *dw = dweight.data_ptr<float>();
  float* z = gated.data_ptr<float>();

  // Rows of dy through W_O^h are gradients of the gated outputs; from them those of outputs and gates.
  const Tensor packed = pack_weights(o, H, C, D, false, [&](int64_t h) { return Rows{w + h * D, H * D}; });
  const float* right = packed.const_data_ptr<float>();
  const auto tasks = pieces(pairs, B, PIECE);
  for_each_task(tasks.size(), no_scratch, [&](int64_t task, NoScratch&) {
    const auto [h, begin, end] = tasks[task];
    multiply(Rows{dy, C, pairs.token + begin}, end - begin, Rows{right + h * C * width, width}, C,
             Target{d_o + begin * D, D}, D, false);
    for (int64_t p = begin; p < end; p++) {
      const int64_t at = pairs.token[p] * H + h;
      float dot = 0;
      for (int64_t d = 0; d < D; d++) {
        dot += d_o[p * D + d] * out[p * D + d];
        z[p * width + d] = gate[at] * out[p * D + d];
        d_o[p * D + d] *= gate[at];
      }
      dg[at] = dot;
    }
  });

  const int64_t parts = ceil_div(C, COLUMNS);
  for_each_task(H * parts, no_scratch, [&](int64_t task, NoScratch&) {
    const int64_t h = task / parts, row = task % parts * COLUMNS, rows = std::min(COLUMNS, C - row);
    for (int64_t p = pairs.begin(h * B); p < pairs.end(h * B + B - 1); p += TERMS) {
      const int64_t terms = std::min(TERMS, pairs.end(h * B + B - 1) - p);
      multiply<Left::COLUMNS>(Rows{dy + row, C, pairs.token + p}, rows, Rows{z + p * width, width}, terms,
                              Target{dw + row * H * D + h * D, H * D}, D, true);
    }
  });
  return {dout, dgates, dweight};
}

// ---- attend

// Keys or values as `multiply` can read them as its right matrix: padded width, and for many keys side by side, since rows
// that lie a power of two apart share few places of the cache.
Tensor side_by_side(const Tensor& x) {
  const int64_t B = x.size(0), G = x.size(1), M = x.size(2), D = x.size(3), width = padded(D);
  if (x.stride(3) == 1 && D == width && (M <= 256 || x.stride(2) == D)) return x;
  Tensor copy = at::empty({B, G, M, width}, x.options());
  const Tensor rows = with_contiguous_rows(x);
  const HeadRows<float> from(rows);
  float* to = copy.data_ptr<float>();
  for_each_task(B * G, no_scratch, [&](int64_t i, NoScratch&) {
    for (int64_t j = 0; j < M; j++) {
      std::memcpy(to + (i * M + j) * width, from.at(i) + j * from.stride, D * sizeof(float));
      std::fill(to + (i * M + j) * width + D, to + (i * M + j + 1) * width, 0.f);
    }
  });
  return copy;
}

// Positions of the queries of a tile in their sequence, rising.
struct Positions {
  int32_t n[QUERIES];
  Positions(const Pairs& pairs, int64_t begin, int64_t count, int64_t tokens) {
    for (int64_t i = 0; i < count; i++) n[i] = pairs.token[begin + i] % tokens;
  }
};

void check_attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& token, const Tensor& offsets,
                  int64_t H, int64_t tokens, const std::optional<Tensor>& source, const std::optional<Tensor>& mask) {
  TORCH_CHECK(k.dim() == 4 && v.sizes() == k.sizes(), "k and v are [B, G, M, D], not ", k.sizes(), " and ", v.sizes());
  check_rows(q, "q", token.numel(), k.size(3));
  check_float(q, "q");
  check_float(k, "k");
  check_float(v, "v");
  TORCH_CHECK(source || offsets.numel() - 1 == H * k.size(0), "the segments are not those of H heads and B sequences");
  check_mask(mask, (offsets.numel() - 1) / H, H, tokens, k.size(2));
}

struct ForwardScratch {
  Floats queries, scores, sums;
  explicit ForwardScratch(int64_t D) : queries(D * QUERIES), scores(KEYS * QUERIES), sums(QUERIES * padded(D)) {}
};

std::tuple<Tensor, Tensor> attend(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& token,
                                  const Tensor& offsets, int64_t H, int64_t tokens, const std::optional<Tensor>& source,
                                  bool is_causal, const std::optional<Tensor>& mask_) {
  check_attend(q_, k_, v_, token, offsets, H, tokens, source, mask_);
  const Pairs pairs(token, offsets, H, tokens);
  const Tensor q = q_.contiguous();
  const int64_t D = q.size(1), M = k_.size(2), width = padded(D);
  const Tensor k = side_by_side(k_), v = side_by_side(v_);
  const HeadRows<float> keys(k), values(v);
  const auto reads = sources(source, pairs, H, k);
  const Mask mask(mask_, is_causal, pairs.segments / H);
  Tensor out = at::empty({pairs.count, D}, q.options()), log_sums = at::empty({pairs.count}, q.options());
  const float* queries = q.const_data_ptr<float>();
  float *o = out.data_ptr<float>(), *lse = log_sums.data_ptr<float>();
  const float factor = 1 / std::sqrt(static_cast<float>(D));
  const auto tasks = pieces(pairs, 1, QUERIES);

  for_each_task(tasks.size(), [&] { return ForwardScratch(D); }, [&](int64_t task, ForwardScratch& s) {
    const auto [segment, begin, end] = tasks[task];
    const int64_t count = end - begin, lanes = padded(count);
    const Positions at(pairs, begin, count, tokens);
    const int64_t visible = mask.keys(at.n, count, M);
    const float scale = mask.any() ? 1 : factor;  // a mask is added to scaled scores
    const Rows key_rows{keys.at(reads[segment]), keys.stride}, value_rows{values.at(reads[segment]), values.stride};
    transpose(Rows{queries + begin * D, D}, count, D, s.queries.data(), QUERIES);

    // Scores are held with keys as rows: queries are lanes, and the softmax needs no sum across lanes.
    Vec top[QUERIES / LANES], sum[QUERIES / LANES] = {};
    std::fill(std::begin(top), std::end(top), broadcast(std::numeric_limits<float>::lowest()));
    for (int64_t first = 0; first < visible; first += KEYS) {
      const int64_t rows = std::min(KEYS, visible - first);
      multiply(key_rows.from(first), rows, Rows{s.queries.data(), QUERIES}, D, Target{s.scores.data(), QUERIES}, lanes, false);
      if (mask.any()) mask.apply(s.scores.data(), QUERIES, segment, at.n, count, first, rows, factor);
      for (int64_t i = 0; i < lanes; i += LANES) {
        float* column = s.scores.data() + i;
        Vec highest = top[i / LANES], total{};
        for (int64_t j = 0; j < rows; j++) {
          const Vec score = load(column + j * QUERIES) * broadcast(scale);
          highest = maximum(score, highest);
        }
        for (int64_t j = 0; j < rows; j++) {
          const Vec weight = exponential(load(column + j * QUERIES) * broadcast(scale) - highest);
          store(column + j * QUERIES, weight);
          total += weight;
        }
        if (first > 0) {  // what earlier keys gave was relative to an earlier maximum
          const Vec shrink = exponential(top[i / LANES] - highest);
          sum[i / LANES] *= shrink;
          for (int64_t r = i; r < std::min(i + LANES, count); r++)
            for (int64_t d = 0; d < width; d += LANES) {
              float* to = s.sums.data() + r * width + d;
              store(to, load(to) * broadcast(shrink[r - i]));
            }
        }
        top[i / LANES] = highest;
        sum[i / LANES] += total;
      }
      multiply<Left::COLUMNS>(Rows{s.scores.data(), QUERIES}, count, value_rows.from(first), rows,
                              Target{s.sums.data(), width}, D, first > 0);
    }
    for (int64_t i = 0; i < count; i++) {
      const float total = sum[i / LANES][i % LANES];
      const float by = total == 0 || visible == 0 ? 0 : 1 / total;
      for (int64_t d = 0; d < D; d++) o[(begin + i) * D + d] = visible == 0 ? 0 : s.sums[i * width + d] * by;
      lse[begin + i] = total == 0 ? std::numeric_limits<float>::infinity() : top[i / LANES][i % LANES] + std::log(total);
    }
  });
  return {out, log_sums};
}

struct BackwardScratch {
  Floats queries, grads, probs, dscores;
  explicit BackwardScratch(int64_t D)
      : queries(D * QUERIES), grads(D * QUERIES), probs(KEYS * QUERIES), dscores(KEYS * QUERIES) {}
};

std::tuple<Tensor, Tensor, Tensor> attend_backward(
    const Tensor& grad_, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& o_, const Tensor& log_sums_,
    const Tensor& token, const Tensor& offsets, int64_t H, int64_t tokens, const std::optional<Tensor>& source, bool is_causal,
    const std::optional<Tensor>& mask_) {
  check_attend(q_, k_, v_, token, offsets, H, tokens, source, mask_);
  check_rows(grad_, "grad", q_.size(0), q_.size(1));
  check_rows(o_, "o", q_.size(0), q_.size(1));
  TORCH_CHECK(log_sums_.numel() == q_.size(0), "lse has ", log_sums_.numel(), " numbers for ", q_.size(0), " queries");
  const Pairs pairs(token, offsets, H, tokens);
  const int64_t B = k_.size(0), G = k_.size(1), M = k_.size(2), D = q_.size(1);
  const Tensor o = o_.contiguous(), log_sums = log_sums_.contiguous();
  const Tensor q = with_room(q_.contiguous()), grad = with_room(grad_.contiguous()), k = side_by_side(k_), v = side_by_side(v_);
  const HeadRows<float> keys(k), values(v);
  const auto reads = sources(source, pairs, H, k);
  const Mask mask(mask_, is_causal, pairs.segments / H);
  const int64_t range_keys = std::max(KEY_RANGE, ceil_div(ceil_div(M, MOST_RANGES), KEYS) * KEYS);
  const int64_t ranges = std::max<int64_t>(1, ceil_div(M, range_keys));
  Tensor partial = at::empty({ranges, pairs.count, D}, q.options());  // of dq, one for each range of keys
  Tensor dk = at::zeros({B, M, G, D}, q.options()), dv = at::zeros({B, M, G, D}, q.options());
  const float *queries = q.const_data_ptr<float>(), *grads = grad.const_data_ptr<float>();
  const float *out = o.const_data_ptr<float>(), *lse = log_sums.const_data_ptr<float>();
  float *dq = partial.data_ptr<float>(), *dkeys = dk.data_ptr<float>(), *dvalues = dv.data_ptr<float>();
  const float factor = 1 / std::sqrt(static_cast<float>(D));

  std::vector<std::vector<int64_t>> readers(B * G);  // the segments that read keys b * G + g, in order
  for (int64_t s = 0; s < pairs.segments; s++)
    if (pairs.end(s) > pairs.begin(s)) readers[reads[s]].push_back(s);
  Floats deltas(pairs.count);  // sum over d of o * gradient, which the softmax takes off every key's gradient
  for_each_task(ceil_div(pairs.count, QUERIES), no_scratch, [&](int64_t task, NoScratch&) {
    for (int64_t p = task * QUERIES; p < std::min((task + 1) * QUERIES, pairs.count); p++) {
      Vec dot{};
      for (int64_t d = 0; d < D; d += LANES) {
        const int64_t count = std::min<int64_t>(LANES, D - d);
        dot += load_part(out + p * D + d, count) * load_part(grads + p * D + d, count);
      }
      for (int i = 0; i < LANES; i++) deltas[p] += dot[i];
    }
  });

  for_each_task(B * G * ranges, [&] { return BackwardScratch(D); }, [&](int64_t task, BackwardScratch& s) {
    const int64_t read = task / ranges, range = task % ranges;
    const int64_t first = range * range_keys, last = std::min(first + range_keys, M);
    const Rows key_rows{keys.at(read), keys.stride}, value_rows{values.at(read), values.stride};
    const Target dkey_rows{dkeys + (read / G * M * G + read % G) * D, G * D};
    const Target dvalue_rows{dvalues + (read / G * M * G + read % G) * D, G * D};
    for (const int64_t segment : readers[read])
      for (int64_t begin = pairs.begin(segment); begin < pairs.end(segment); begin += QUERIES) {
        const int64_t count = std::min(QUERIES, pairs.end(segment) - begin), lanes = padded(count);
        const Positions at(pairs, begin, count, tokens);
        const int64_t visible = std::min(last, mask.keys(at.n, count, M));
        float* dq_tile = dq + (range * pairs.count + begin) * D;
        if (visible <= first) std::fill(dq_tile, dq_tile + count * D, 0.f);
        transpose(Rows{queries + begin * D, D}, count, D, s.queries.data(), QUERIES);
        transpose(Rows{grads + begin * D, D}, count, D, s.grads.data(), QUERIES);
        const Rows query_rows{queries + begin * D, D}, grad_rows{grads + begin * D, D};
        for (int64_t j0 = first; j0 < visible; j0 += KEYS) {
          const int64_t rows = std::min(KEYS, visible - j0);
          float *probs = s.probs.data(), *dscores = s.dscores.data();
          multiply(key_rows.from(j0), rows, Rows{s.queries.data(), QUERIES}, D, Target{probs, QUERIES}, lanes, false);
          if (mask.any()) mask.apply(probs, QUERIES, segment, at.n, count, j0, rows, factor);
          multiply(value_rows.from(j0), rows, Rows{s.grads.data(), QUERIES}, D, Target{dscores, QUERIES}, lanes, false);
          const Vec scale = broadcast(mask.any() ? 1 : factor);
          for (int64_t i = 0; i < lanes; i += LANES) {
            const Vec log_sum = load_part(lse + begin + i, std::min<int64_t>(LANES, count - i));
            const Vec delta = load_part(deltas.data() + begin + i, std::min<int64_t>(LANES, count - i));
            for (int64_t j = i; j < i + rows * QUERIES; j += QUERIES) {
              const Vec prob = exponential(load(probs + j) * scale - log_sum);
              store(probs + j, prob);
              store(dscores + j, prob * (load(dscores + j) - delta) * broadcast(factor));
            }
          }
          multiply(Rows{probs, QUERIES}, rows, grad_rows, count, dvalue_rows.from(j0), D, true);
          multiply(Rows{dscores, QUERIES}, rows, query_rows, count, dkey_rows.from(j0), D, true);
          multiply<Left::COLUMNS>(Rows{dscores, QUERIES}, count, key_rows.from(j0), rows, Target{dq_tile, D}, D, j0 > first);
        }
      }
  });
  return {ranges == 1 ? partial[0] : at::sum(partial, 0), dk.transpose(1, 2), dv.transpose(1, 2)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(moh_vision, m) {
  m.def("project(Tensor x, Tensor weight, Tensor? bias, Tensor token, Tensor offsets, int heads) -> Tensor");
  m.def("project_backward(Tensor grad, Tensor x, Tensor weight, Tensor token, Tensor offsets, int heads) -> (Tensor, Tensor, Tensor)");
  m.def("combine(Tensor o, Tensor weights, Tensor weight, Tensor? bias, Tensor token, Tensor offsets, int heads) -> Tensor");
  m.def("combine_backward(Tensor grad, Tensor o, Tensor weights, Tensor weight, Tensor token, Tensor offsets, int heads) -> (Tensor, Tensor, Tensor)");
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor token, Tensor offsets, SymInt heads, SymInt tokens, Tensor? source, bool is_causal, Tensor? mask) -> (Tensor, Tensor)");
  m.def("attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor token, Tensor offsets, SymInt heads, SymInt tokens, Tensor? source, bool is_causal, Tensor? mask) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(moh_vision, CPU, m) {
  m.impl("project", &project);
  m.impl("project_backward", &project_backward);
  m.impl("combine", &combine);
  m.impl("combine_backward", &combine_backward);
  m.impl("attend", &attend);
  m.impl("attend_backward", &attend_backward);
}

}  // namespace moh

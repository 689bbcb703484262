// What the operators share beside arithmetic: the list of pairs that run, keys and values, masks.
#pragma once

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "vector.h"

namespace moh {

using at::Tensor;

// The (head, sequence, token) pairs that run, sorted. Segment s = h * B + b holds pairs offset[s] .. offset[s + 1] - 1.
struct Pairs {
  const int32_t* token;   // [pairs] b * N + n
  const int32_t* offset;  // [segments + 1]
  int64_t segments, count;

  Pairs(const Tensor& tokens, const Tensor& offsets)
      : token(tokens.const_data_ptr<int32_t>()), offset(offsets.const_data_ptr<int32_t>()),
        segments(offsets.numel() - 1), count(tokens.numel()) {}
  int64_t begin(int64_t s) const { return offset[s]; }
  int64_t end(int64_t s) const { return offset[s + 1]; }
};

// Pairs `begin` .. `end` - 1, of one segment or one head.
struct Piece {
  int64_t segment, begin, end;
  int64_t size() const { return end - begin; }
};

// The pairs of every `group` neighbouring segments (1, or B: a head) in pieces of at most `size`.
inline std::vector<Piece> pieces(const Pairs& pairs, int64_t group, int64_t size) {
  std::vector<Piece> result;
  for (int64_t s = 0; s < pairs.segments; s += group)
    for (int64_t p = pairs.begin(s); p < pairs.end(s + group - 1); p += size)
      result.push_back({s / group, p, std::min(p + size, pairs.end(s + group - 1))});
  return result;
}

// Keys or values [B, G, M, D] where they lie; `row(s)` begins what a segment reads.
template <class T>
struct HeadRows {
  const T* data;
  int64_t groups, batch_stride, group_stride, stride;

  explicit HeadRows(const Tensor& x)
      : data(x.const_data_ptr<T>()), groups(x.size(1)), batch_stride(x.stride(0)), group_stride(x.stride(1)),
        stride(x.stride(2)) {}
  const T* at(int64_t source) const { return data + source / groups * batch_stride + source % groups * group_stride; }
};

// Which b * G + g of the keys each segment reads: as given, or its own sequence and the group of its head.
inline std::vector<int32_t> sources(const std::optional<Tensor>& source, int64_t segments, int64_t H,
                                    const Tensor& k) {
  if (source) return {source->const_data_ptr<int32_t>(), source->const_data_ptr<int32_t>() + segments};
  const int64_t B = k.size(0), G = k.size(1);
  std::vector<int32_t> result(segments);
  for (int64_t s = 0; s < segments; s++) result[s] = s % B * G + s / B * G / H;
  return result;
}

// A float32 matrix whose rows `multiply` can read as whole vectors: at its end is room for one more.
inline Tensor with_room(const Tensor& matrix) {
  const bool fits = matrix.scalar_type() == at::kFloat && matrix.size(1) % LANES == 0 && matrix.stride(1) == 1;
  if (fits) return matrix;
  const Tensor room = at::empty({matrix.numel() + LANES}, matrix.options().dtype(at::kFloat));
  return room.narrow(0, 0, matrix.numel()).view(matrix.sizes()).copy_(matrix);
}

// What hides keys from queries: an additive or boolean mask [B or 1, H or 1, N or 1, M], or the order of tokens.
struct Mask {
  const float* added = nullptr;
  const bool* seen = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, batch = 1;
  bool causal;

  Mask(const std::optional<Tensor>& mask, bool is_causal, int64_t B) : batch(B), causal(is_causal) {
    if (!mask) return;
    if (mask->scalar_type() == at::kBool) seen = mask->const_data_ptr<bool>();
    else added = mask->const_data_ptr<float>();
    batch_stride = mask->size(0) > 1 ? mask->stride(0) : 0;
    head_stride = mask->size(1) > 1 ? mask->stride(1) : 0;
    row_stride = mask->size(2) > 1 ? mask->stride(2) : 0;
  }
  bool any() const { return added || seen || causal; }

  // How many of M keys the queries at tokens n[0 .. count - 1], in rising order, may see at all.
  int64_t keys(const int32_t* n, int64_t count, int64_t M) const {
    return causal ? std::min<int64_t>(M, n[count - 1] + 1) : M;
  }

  // scores[j * stride + i] = scale * score + mask, of query i at token n[i] and key first + j; i < count, j < keys.
  void apply(float* scores, int64_t stride, int64_t segment, const int32_t* n, int64_t count, int64_t first,
             int64_t keys, float scale) const {
    constexpr float hidden = -std::numeric_limits<float>::infinity();
    const int64_t base = segment % batch * batch_stride + segment / batch * head_stride + first;
    const int64_t lanes = padded(count);
    for (int64_t j = 0; j < keys; j++) {
      float plus = 0;
      if (row_stride == 0 && (added || seen)) plus = added ? added[base + j] : seen[base + j] ? 0.f : hidden;
      float* row = scores + j * stride;
      for (int64_t i = 0; i < lanes; i += LANES) store(row + i, load(row + i) * broadcast(scale) + broadcast(plus));
    }
    for (int64_t i = 0; i < count; i++) {
      if (row_stride != 0)
        for (int64_t j = 0; j < keys; j++) {
          const int64_t at = base + n[i] * row_stride + j;
          scores[j * stride + i] += added ? added[at] : seen[at] ? 0.f : hidden;
        }
      if (causal)
        for (int64_t j = std::max<int64_t>(0, n[i] + 1 - first); j < keys; j++) scores[j * stride + i] = hidden;
    }
  }
};

}  // namespace moh

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

  // Refuses a list that is not one of H heads and of sequences of N tokens: the operators follow it without a look, and
  // would read and write beyond their tensors.
  Pairs(const Tensor& tokens, const Tensor& offsets, int64_t H, int64_t N)
      : token(tokens.const_data_ptr<int32_t>()), offset(offsets.const_data_ptr<int32_t>()),
        segments(offsets.numel() - 1), count(tokens.numel()) {
    TORCH_CHECK_VALUE(tokens.dim() == 1 && tokens.is_contiguous() && offsets.dim() == 1 && offsets.is_contiguous(),
                      "token and offsets are not contiguous vectors");
    TORCH_CHECK_VALUE(H > 0 && N >= 0 && segments >= 0 && segments % H == 0, offsets.numel(),
                      " offsets are not those of ", H, " heads and any number of sequences");
    TORCH_CHECK_VALUE(offset[0] == 0 && offset[segments] == count, "offsets go from ", offset[0], " to ",
                      offset[segments], ", not from 0 to the ", count, " pairs");
    for (int64_t s = 0; s < segments; s++) check_segment(s, s % (segments / H) * N, N);
  }
  int64_t begin(int64_t s) const { return offset[s]; }
  int64_t end(int64_t s) const { return offset[s + 1]; }

 private:
  // A segment has tokens `first` .. `first` + N - 1 of its sequence, in rising order.
  void check_segment(int64_t s, int64_t first, int64_t N) const {
    TORCH_CHECK_VALUE(begin(s) <= end(s) && end(s) <= count, "offsets of segment ", s, " are ", begin(s), " and ",
                      end(s), " of ", count, " pairs");
    if (begin(s) == end(s)) return;
    bool rising = true;
    for (int64_t p = begin(s) + 1; p < end(s); p++) rising &= token[p - 1] < token[p];
    const int64_t least = token[begin(s)], most = token[end(s) - 1];
    TORCH_CHECK_VALUE(rising && least >= first && most < first + N, "tokens of segment ", s, " go from ", least, " to ",
                      most, ", not in rising order within ", first, " .. ", first + N - 1, " of its sequence");
  }
};

// The same for rows of tokens [T, ..] of all sequences together.
inline Pairs pairs_of_rows(const Tensor& token, const Tensor& offsets, int64_t H, int64_t T) {
  const int64_t B = H > 0 ? (offsets.numel() - 1) / H : 0;
  TORCH_CHECK_VALUE(B > 0 ? T % B == 0 : T == 0, T, " tokens are not those of ", B, " sequences of one length");
  return Pairs(token, offsets, H, B > 0 ? T / B : 0);
}

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

inline Tensor with_contiguous_rows(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

// Keys or values [B, G, M, D] where they lie; `at(s)` begins what source s reads. It keeps a pointer and no tensor, so
// that a temporary tensor, whose memory is gone when it is read, does not compile.
template <class T>
struct HeadRows {
  const T* data;
  int64_t groups, batch_stride, group_stride, stride;

  explicit HeadRows(const Tensor&&) = delete;
  explicit HeadRows(const Tensor& x)
      : data(x.const_data_ptr<T>()), groups(x.size(1)), batch_stride(x.stride(0)), group_stride(x.stride(1)),
        stride(x.stride(2)) {}
  const T* at(int64_t source) const { return data + source / groups * batch_stride + source % groups * group_stride; }
};

// Which b * G + g of the keys each segment reads: as given, or its own sequence and the group of its head.
inline std::vector<int32_t> sources(const std::optional<Tensor>& source, const Pairs& pairs, int64_t H,
                                    const Tensor& k) {
  const int64_t B = k.size(0), G = k.size(1);
  std::vector<int32_t> result(pairs.segments);
  if (!source) {
    for (int64_t s = 0; s < pairs.segments; s++) result[s] = s % B * G + s / B * G / H;
    return result;
  }
  TORCH_CHECK_VALUE(source->dim() == 1 && source->numel() == pairs.segments, "source is ", source->sizes(),
                    ", not a number for each of ", pairs.segments, " segments");
  TORCH_CHECK_VALUE(source->is_contiguous(), "source is not a contiguous vector");
  const int32_t* from = source->const_data_ptr<int32_t>();
  for (int64_t s = 0; s < pairs.segments; s++) {
    if (pairs.begin(s) == pairs.end(s)) continue;  // reads nothing
    TORCH_CHECK_VALUE(from[s] >= 0 && from[s] < B * G, "source of segment ", s, " is ", from[s], " of ", B * G, " keys");
    result[s] = from[s];
  }
  return result;
}

// A float32 matrix whose rows `multiply` can read as whole vectors: at its end is room for one more.
inline Tensor with_room(const Tensor& matrix) {
  const bool fits = matrix.scalar_type() == at::kFloat && matrix.size(1) % LANES == 0 && matrix.stride(1) == 1;
  if (fits) return matrix;
  const Tensor room = at::empty({matrix.numel() + LANES}, matrix.options().dtype(at::kFloat));
  return room.narrow(0, 0, matrix.numel()).view(matrix.sizes()).copy_(matrix);
}

inline void check_mask(const std::optional<Tensor>& mask, int64_t B, int64_t H, int64_t N, int64_t M) {
  if (!mask) return;
  const int64_t full[] = {B, H, N, M};
  for (int dim = 0; dim < 4; dim++)
    TORCH_CHECK(mask->dim() == 4 && (mask->size(dim) == full[dim] || (dim < 3 && mask->size(dim) == 1)), "mask is ",
                mask->sizes(), ", not [B or 1, H or 1, N or 1, M] of ", at::IntArrayRef(full, 4));
  TORCH_CHECK(mask->stride(3) == 1 || mask->size(3) == 1, "rows of the mask are not contiguous");
}

// What hides keys from queries: an additive or boolean mask [B or 1, H or 1, N or 1, M], or the order of tokens.
struct Mask {
  const float* added = nullptr;
  const bool* seen = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, batch = 1;
  bool causal;

  Mask(const std::optional<Tensor>&&, bool, int64_t) = delete;  // see HeadRows
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

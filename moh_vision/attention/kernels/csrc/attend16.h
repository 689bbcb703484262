// `attend` in 16 bits, on libtorch's brgemm. The arguments are those of the operators in packed.cpp, checked there.
#pragma once

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace moh {

// Whether this processor multiplies such matrices faster than their float32 form.
bool brgemm_available(at::ScalarType dtype);

std::tuple<at::Tensor, at::Tensor> attend16(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& token, const at::Tensor& offsets,
    int64_t H, int64_t tokens, const std::optional<at::Tensor>& source, bool is_causal, const std::optional<at::Tensor>& mask);

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend16_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& o,
    const at::Tensor& lse, const at::Tensor& token, const at::Tensor& offsets, int64_t H, int64_t tokens,
    const std::optional<at::Tensor>& source, bool is_causal, const std::optional<at::Tensor>& mask);

}  // namespace moh

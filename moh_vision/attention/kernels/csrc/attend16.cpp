// Not yet: everything in 16 bits runs in plain PyTorch.
#include "attend16.h"

#include <c10/util/Exception.h>

namespace moh {

using at::Tensor;

bool brgemm_available(at::ScalarType) { return false; }

std::tuple<Tensor, Tensor> attend16(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
                                    int64_t, const std::optional<Tensor>&, bool, const std::optional<Tensor>&) {
  TORCH_CHECK(false, "attend has no form in 16 bits here");
}

std::tuple<Tensor, Tensor, Tensor> attend16_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                     const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
                                                     int64_t, const std::optional<Tensor>&, bool,
                                                     const std::optional<Tensor>&) {
  TORCH_CHECK(false, "attend has no form in 16 bits here");
}

}  // namespace moh

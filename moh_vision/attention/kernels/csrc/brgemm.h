// Products of 16-bit matrices by libtorch's brgemm: whether they can be used.
#pragma once

#include <c10/core/ScalarType.h>

namespace moh {

// Whether this processor multiplies such matrices faster than their float32 form. Defined in attend16.cpp.
bool brgemm_available(at::ScalarType dtype);

}  // namespace moh

// views.h — argument types of the oracles. Inputs are non-deduced, so a view of mutable elements
// may be passed for one of const elements.
#pragma once

#include <type_traits>

#include "tensor/view.h"

namespace tandem::ref {

template <typename Real>
using Vec = TensorView<Real, 1>;
template <typename Real>
using Mat = TensorView<Real, 2>;
template <typename Real>
using Cube = TensorView<Real, 3>;
template <typename Real>
using ConstVec = TensorView<const std::type_identity_t<Real>, 1>;
template <typename Real>
using ConstMat = TensorView<const std::type_identity_t<Real>, 2>;
template <typename Real>
using ConstCube = TensorView<const std::type_identity_t<Real>, 3>;
template <typename Real>
using Scalar = std::type_identity_t<Real>;

}  // namespace tandem::ref

// embed_ref.h — oracle of ops/embed.h: plain loops on a scalar type.
#pragma once

#include "ops/ref/views.h"

namespace tandem::ref {

template <typename Real>
void embed(Mat<Real> y, ConstMat<Real> table, ConstI32Vec ids) {
  for (std::int64_t t = 0; t < ids.size(0); ++t) {
    for (std::int64_t i = 0; i < table.size(1); ++i) {
      y(t, i) = table(ids(t), i);
    }
  }
}

template <typename Real>
void embed_bwd(Mat<Real> d_table, ConstMat<Real> d_y, ConstI32Vec ids) {
  for (std::int64_t t = 0; t < ids.size(0); ++t) {
    for (std::int64_t i = 0; i < d_table.size(1); ++i) {
      d_table(ids(t), i) += d_y(t, i);
    }
  }
}

}  // namespace tandem::ref

// Sparse tensors, as far as the gradient of an embedding needs them: made of indices and rows, and
// made dense.
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "tensors.h"

namespace testdevice {
namespace {

at::Tensor to_dense(const at::Tensor& self, std::optional<at::ScalarType> dtype,
                    std::optional<bool>) {
    TORCH_CHECK(self.sparse_dim() == 1, "the test device knows sparse rows alone");
    const at::ScalarType wanted = dtype.value_or(self.scalar_type());
    at::Tensor dense = at::zeros(self.sizes(), at::TensorOptions().dtype(wanted).device(device()));
    return dense.index_add_(0, self._indices()[0], self._values().to(wanted));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
    m.impl("_sparse_coo_tensor_with_dims_and_tensors",
           at::native::new_with_dims_and_tensor_sparse_symint);
    m.impl("_indices", at::native::_indices_sparse);
    m.impl("_values", at::native::_values_sparse);
    m.impl("_nnz", at::native::_nnz_sparse);
    m.impl("sparse_dim", at::native::sparse_dim_sparse);
    m.impl("dense_dim", at::native::dense_dim_sparse);
    m.impl("is_coalesced", at::native::is_coalesced_sparse);
    m.impl("_coalesced_", at::native::_coalesced_sparse_);
    m.impl("_to_dense", to_dense);
}

}  // namespace testdevice

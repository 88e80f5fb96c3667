// Automatic mixed precision: the operators that gain by it run in the lower precision, those that need it in float32.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace {

using torch::jit::Stack;

void call_in(at::ScalarType dtype, const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  const auto cast = [&](const at::Tensor& t) { return at::autocast::cached_cast(dtype, t, at::kPrivateUse1); };
  const auto number = op.schema().arguments().size();
  for (auto& value : torch::jit::last(*stack, number)) {
    auto& slot = const_cast<c10::IValue&>(value);
    if (slot.isTensor() && slot.toTensor().defined()) {
      slot = cast(slot.toTensor());
    } else if (slot.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : slot.toTensorList()) {
        list.push_back(cast(t));
      }
      slot = list;
    }
  }
  op.callBoxed(stack);
}

void lower(const c10::OperatorHandle& op, Stack* stack) {
  call_in(at::autocast::get_autocast_dtype(at::kPrivateUse1), op, stack);
}

void in_float32(const c10::OperatorHandle& op, Stack* stack) {
  call_in(at::kFloat, op, stack);
}

// One dtype for all: the widest.
void promoted(const c10::OperatorHandle& op, Stack* stack) {
  auto widest = at::autocast::get_autocast_dtype(at::kPrivateUse1);
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList()) {
        widest = at::autocast::prioritize(widest, t, at::kPrivateUse1);
      }
    }
  }
  call_in(widest, op, stack);
}

} // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const auto* name :
       {"conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding", "_convolution", "linear", "mm",
        "bmm", "addmm", "addbmm", "baddbmm", "addmv", "mv", "matmul", "einsum", "scaled_dot_product_attention", "lstm_cell",
        "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&lower>());
  }
  for (const auto* name :
       {"exp", "log", "log10", "log2", "log1p", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "rsqrt", "softplus",
        "layer_norm", "group_norm", "nll_loss", "nll_loss2d", "cross_entropy_loss", "mse_loss", "l1_loss", "smooth_l1_loss",
        "kl_div", "binary_cross_entropy_with_logits", "cumsum", "cumprod", "sum", "sum.dim_IntList", "prod", "prod.dim_int",
        "softmax.int", "log_softmax.int"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float32>());
  }
  for (const auto* name : {"cat", "stack"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&promoted>());
  }
}

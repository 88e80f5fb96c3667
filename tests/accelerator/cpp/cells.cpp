// The cells of recurrent networks, which PyTorch wants fused from every device that is not the CPU. The workspace, which only
// these functions read, is what the differentiable formulas of PyTorch need.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_thnn_differentiable_gru_cell_backward.h>
#include <ATen/ops/_thnn_differentiable_lstm_cell_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Maybe& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& from_input, const Tensor& from_hidden, const Tensor& cx,
                                        const Maybe& input_bias, const Maybe& hidden_bias) {
  const auto gates = with_bias(from_input, input_bias) + with_bias(from_hidden, hidden_bias);
  const auto parts = gates.chunk(4, 1);
  const auto cy = parts[1].sigmoid() * cx + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * cy.tanh(), cy, gates};
}

std::tuple<Tensor, Tensor, Tensor> lstm_backward(const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx,
                                                 const Tensor& cy, const Tensor& gates, bool has_bias) {
  const auto grads =
      at::_thnn_differentiable_lstm_cell_backward(grad_hy, grad_cy, gates, at::zeros_like(gates), {}, {}, cx, cy);
  const auto& of_gates = std::get<0>(grads);
  return {of_gates, std::get<2>(grads), has_bias ? of_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru(const Tensor& from_input, const Tensor& from_hidden, const Tensor& hx,
                               const Maybe& input_bias, const Maybe& hidden_bias) {
  const auto of_input = with_bias(from_input, input_bias), of_hidden = with_bias(from_hidden, hidden_bias);
  const auto a = of_input.chunk(3, 1), b = of_hidden.chunk(3, 1);
  const auto reset = (a[0] + b[0]).sigmoid(), update = (a[1] + b[1]).sigmoid();
  const auto fresh = (a[2] + reset * b[2]).tanh();
  return {(hx - fresh) * update + fresh, at::cat({of_input, of_hidden, hx}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const auto width = workspace.size(1) / 7;
  auto grads = at::_thnn_differentiable_gru_cell_backward(
      grad_hy, workspace.narrow(1, 0, 3 * width), workspace.narrow(1, 3 * width, 3 * width),
      workspace.narrow(1, 6 * width, width), {}, {});
  if (has_bias) {
    std::get<3>(grads) = std::get<0>(grads).sum(0);
    std::get<4>(grads) = std::get<1>(grads).sum(0);
  }
  return grads;
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward);
  m.impl("_thnn_fused_gru_cell", gru);
  m.impl("_thnn_fused_gru_cell_backward", gru_backward);
}

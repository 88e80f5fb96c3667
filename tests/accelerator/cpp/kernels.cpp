// Operators. What makes views and moves bytes is here by itself; every other operator goes through `run_later`, which has the
// kernel of the CPU run on the device's memory, in the thread of the current stream.
//
// To enqueue an operator, the shapes of what it returns must be known before it has run. They come from a trial: the CPU's
// kernel on zeros of the same shapes, dtypes and strides, once for each (see `Plan`). What it returns then decides, so results
// have the CPU's strides. Operators whose shapes depend on values, that return numbers, or whose trial fails, run at once
// after a wait for the stream; they are counted as "op".
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>
#include <unordered_map>
#include <unordered_set>

namespace sim {

namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

// Below autograd, autocast and Python's modes: this is how the CPU's kernels are called, in whatever thread.
const c10::DispatchKeySet& above_kernels() {
  static const auto keys = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | c10::python_ks;
  return keys;
}

bool is_sim(const Tensor& t) {
  return t.defined() && t.device().type() == kSim;
}

// A tensor of the CPU on memory that lives long enough by other means, so that no tensor of the program is held.
Tensor blob(void* address, const Tensor& like) {
  auto view = at::from_blob(address, like.sizes(), like.strides(), like.options().device(at::kCPU).requires_grad(false));
  view._set_conj(like.is_conj());
  view._set_neg(like.is_neg());
  return view;
}

// The kernels' view of a tensor of the device.
Tensor kernel_view(const Tensor& t) {
  if (t.numel() == 0) {
    return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
  }
  return blob(opened(t.data_ptr(), t.device().index()), t);
}

// `x * 2.5` hands its number on as a tensor that has no say in the dtype of the result.
void keep_wrapped(const Tensor& from, const Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

Tensor cpu_copy(const Tensor& t) {
  auto copy = at::empty_strided(t.sizes(), t.strides(), t.options().requires_grad(false).pinned_memory(false));
  copy.copy_(t);
  keep_wrapped(t, copy);
  return copy;
}

Tensor zeros_like_geometry(const Tensor& t) {
  auto zeros = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false)).zero_();
  zeros._set_conj(t.is_conj());
  zeros._set_neg(t.is_neg());
  keep_wrapped(t, zeros);
  return zeros;
}

// The value with each tensor in it replaced.
template <typename F>
IValue mapped(const IValue& value, F replace) {
  const auto of = [&](const Tensor& t) { return t.defined() ? replace(t) : t; };
  if (value.isTensor()) {
    return of(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorList()) {
      list.push_back(of(t));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList()) {
      list.push_back(t ? std::optional(of(*t)) : t);
    }
    return list;
  }
  return value;
}

template <typename F>
void for_each_tensor(const IValue& value, F see) {
  mapped(value, [&](const Tensor& t) {
    see(t);
    return t;
  });
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_out(const c10::Argument& argument) {
  return is_written(argument) && argument.kwarg_only();
}

// ---- operators whose results' shapes depend on values

bool depends_on_values(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::repeat_interleave",
      "aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::_pack_padded_sequence",
      "aten::linalg_lstsq", "aten::segment_reduce"};
  return names.count(name) != 0;
}

// Where tensors of the CPU may stand beside those of the device, besides numbers.
bool takes_cpu_tensors(const std::string& name) {
  return name == "aten::_pack_padded_sequence" || name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_" ||
      name == "aten::tensor_split";
}

bool returns_tensors_alone(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    const auto& type = *result.type();
    if (!type.isSubtypeOf(*c10::TensorType::get()) && !type.isSubtypeOf(*c10::ListType::ofTensors())) {
      return false;
    }
  }
  return true;
}

// ---- what an operator will return

struct Geometry {
  bool defined = false;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> sizes, strides;

  Geometry() = default;
  explicit Geometry(const Tensor& t) : defined(t.defined()) {
    if (defined) {
      dtype = t.scalar_type();
      sizes = t.sizes().vec();
      strides = t.strides().vec();
    }
  }
  Tensor allocate(c10::DeviceIndex device) const {
    if (!defined) {
      return {};
    }
    return at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(device_at(device)));
  }
};

struct Plan {
  bool possible = false;
  std::vector<std::vector<Geometry>> returns; // a tensor, or those of a list; of those that are arguments nothing
  std::map<size_t, Geometry> outs; // by argument, if the trial gave them another shape
};

void put_key(std::string& key, const IValue& value) {
  const auto number = [&](auto n) { key.append(reinterpret_cast<const char*>(&n), sizeof n); };
  const auto numbers = [&](const auto& ns) {
    number(ns.size());
    for (const auto n : ns) {
      number(n);
    }
  };
  key.push_back('|');
  if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
    for_each_tensor(value, [&](const Tensor& t) {
      key.push_back('t');
      numbers(t.sizes());
      numbers(t.strides());
      number(t.scalar_type());
      number(char(t.is_conj() + 2 * t.is_neg() + 4 * t.unsafeGetTensorImpl()->is_wrapped_number()));
    });
    if (value.isTensor() && !value.toTensor().defined()) {
      key.push_back('u');
    }
    if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& t : value.toOptionalTensorList()) {
        key.push_back(t && t->defined() ? '1' : '0');
      }
    }
  } else if (value.isInt()) {
    number(value.toInt());
  } else if (value.isDouble()) {
    number(value.toDouble());
  } else if (value.isBool()) {
    number(value.toBool());
  } else if (value.isIntList()) {
    numbers(value.toIntVector());
  } else if (value.isGenerator() || value.isNone()) {
    key.push_back(value.isNone() ? 'n' : 'g');
  } else {
    std::ostringstream text;
    text << value;
    key += text.str();
  }
}

bool is_an_argument(const c10::Argument& result) {
  return result.alias_info() != nullptr && result.alias_info()->isWrite();
}

Plan try_out(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
  Plan plan;
  const auto& schema = op.schema();
  Stack stack;
  for (const auto& arg : args) {
    stack.push_back(mapped(arg, zeros_like_geometry));
  }
  const auto tried = stack; // the operator takes its arguments off the stack
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  } catch (const std::exception&) {
    return plan; // a mistake of the program's, or zeros are not good enough; to run it tells which
  }
  for (size_t i = 0; i < args.size(); ++i) {
    if (is_out(schema.arguments()[i]) && args[i].isTensor() &&
        tried[i].toTensor().sizes() != args[i].toTensor().sizes()) {
      plan.outs[i] = Geometry(tried[i].toTensor());
    }
  }
  for (size_t i = 0; i < stack.size(); ++i) {
    auto& row = plan.returns.emplace_back();
    if (is_an_argument(schema.returns()[i])) {
      continue;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        schema.returns()[i].alias_info() == nullptr, "sim has no kernel for the view ", schema.operator_name());
    if (stack[i].isTensor()) {
      row.emplace_back(stack[i].toTensor());
    } else {
      for (const Tensor& t : stack[i].toTensorList()) {
        row.emplace_back(t);
      }
    }
  }
  plan.possible = true;
  return plan;
}

Plan plan_of(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
  const auto& schema = op.schema();
  bool needed = false;
  for (const auto& result : schema.returns()) {
    needed |= !is_an_argument(result);
  }
  for (size_t i = 0; i < args.size(); ++i) {
    needed |= is_out(schema.arguments()[i]) && args[i].isTensor();
  }
  // A mask of zeros selects nothing; by here PyTorch has given the result its shape.
  const auto has_mask = [&] {
    bool mask = false;
    for_each_tensor(args.at(1), [&](const Tensor& t) { mask |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; });
    return mask;
  };
  if (!needed || (schema.name() == "aten::index" && has_mask())) {
    Plan plan;
    plan.possible = true;
    plan.returns.resize(schema.returns().size());
    return plan;
  }
  static auto& known = *new std::unordered_map<std::string, Plan>();
  static auto& mutex = *new std::mutex();
  std::string key = schema.name() + "." + schema.overload_name();
  for (const auto& arg : args) {
    put_key(key, arg);
  }
  {
    std::lock_guard lock(mutex);
    if (const auto found = known.find(key); found != known.end()) {
      return found->second;
    }
  }
  auto plan = try_out(op, args); // may take the GIL, for a kernel that is written in Python: not while holding a lock
  std::lock_guard lock(mutex);
  if (known.size() > 10000) {
    known.clear();
  }
  known[key] = plan;
  return plan;
}

// ---- running

// The argument that a result is, by its place in the schema's alias sets.
const IValue& argument_of(const c10::FunctionSchema& schema, size_t result, const std::vector<IValue>& args) {
  const auto& alias = *schema.returns()[result].alias_info();
  for (size_t i = 0; i < args.size(); ++i) {
    const auto* info = schema.arguments()[i].alias_info();
    if (info != nullptr && *info == alias) {
      return args[i];
    }
  }
  TORCH_INTERNAL_ASSERT(false, schema.operator_name());
}

Tensor uploaded(const Tensor& cpu, c10::DeviceIndex device, c10::Stream stream) {
  auto made = Geometry(cpu).allocate(device);
  enqueue(stream, "result", [to = kernel_view(made), cpu] { to.copy_(cpu); });
  return made;
}

void resize_to(const Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides);

void run_now(const c10::OperatorHandle& op, std::vector<IValue> args, std::vector<IValue> kernel_args,
             c10::DeviceIndex device, Stack* stack) {
  const auto& schema = op.schema();
  const auto stream = current_stream(device);
  synchronize(stream, "op", schema.name());
  Stack results;
  for (size_t i = 0; i < args.size(); ++i) {
    // A view cannot be resized, which `out` may have to be.
    results.push_back(is_out(schema.arguments()[i]) ? mapped(kernel_args[i], cpu_copy) : kernel_args[i]);
  }
  const auto given = results;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
  for (size_t i = 0; i < args.size(); ++i) {
    if (is_out(schema.arguments()[i]) && args[i].isTensor()) {
      const auto& out = args[i].toTensor();
      const auto cpu = given[i].toTensor();
      if (out.sizes() != cpu.sizes()) {
        resize_to(out, cpu.sizes(), cpu.strides());
      }
      enqueue(stream, "result", [to = kernel_view(out), cpu] { to.copy_(cpu); });
    }
  }
  for (size_t i = 0; i < results.size(); ++i) {
    stack->push_back(
        is_an_argument(schema.returns()[i])
            ? argument_of(schema, i, args)
            : mapped(results[i], [&](const Tensor& t) { return uploaded(t, device, stream); }));
  }
}

void run_later(const c10::OperatorHandle& op, const std::vector<IValue>& args, std::vector<IValue> kernel_args,
               const Plan& plan, c10::DeviceIndex device, Stack* stack) {
  const auto& schema = op.schema();
  const auto stream = current_stream(device);
  for (const auto& [i, geometry] : plan.outs) {
    const auto& out = args[i].toTensor();
    resize_to(out, geometry.sizes, geometry.strides);
    kernel_args[i] = kernel_view(out);
  }
  std::vector<std::pair<size_t, std::vector<Tensor>>> targets; // of results that are not arguments
  for (size_t i = 0; i < plan.returns.size(); ++i) {
    if (is_an_argument(schema.returns()[i])) {
      stack->push_back(argument_of(schema, i, args));
      continue;
    }
    c10::List<Tensor> made;
    std::vector<Tensor> views;
    for (const auto& geometry : plan.returns[i]) {
      auto t = geometry.allocate(device);
      views.push_back(t.defined() ? kernel_view(t) : t);
      made.push_back(std::move(t));
    }
    const bool list = schema.returns()[i].type()->kind() == c10::TypeKind::ListType;
    stack->push_back(list ? IValue(made) : IValue(Tensor(made.get(0))));
    targets.emplace_back(i, std::move(views));
  }
  count_kernel();
  enqueue(stream, schema.name(), [op, args = std::move(kernel_args), targets = std::move(targets)] {
    const c10::impl::ExcludeDispatchKeyGuard below(above_kernels());
    Stack results(args.begin(), args.end());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
    const auto put = [&](const Tensor& target, const Tensor& result) {
      TORCH_CHECK(
          target.defined() == result.defined() && (!target.defined() || target.sizes() == result.sizes()),
          "the shape of its result depends on values, which sim was not told: name it in depends_on_values");
      if (target.defined()) {
        target.copy_(result);
      }
    };
    for (const auto& [i, views] : targets) {
      if (results[i].isTensor()) {
        put(views[0], results[i].toTensor());
        continue;
      }
      const auto list = results[i].toTensorVector();
      TORCH_CHECK(list.size() == views.size(), "the length of its result depends on values, which sim was not told");
      for (size_t j = 0; j < views.size(); ++j) {
        put(views[j], list[j]);
      }
    }
  });
}

// PyTorch gives convolutions of devices it does not know other names; and leaves the bias out, of which it needs the shape.
c10::OperatorHandle on_cpu(const c10::OperatorHandle& op, std::vector<IValue>& args) {
  const auto& name = op.schema().name();
  if (name == "aten::convolution_overrideable") {
    return c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  }
  if (name == "aten::convolution_backward_overrideable") {
    const auto weight = args[2].toTensor();
    const auto channels = args[6].toBool() ? weight.size(1) * args[8].toInt() : weight.size(0);
    const auto mask = args[9].toBoolList();
    args.insert(args.begin() + 3, mask.get(2) ? IValue(std::vector<int64_t>{channels}) : IValue());
    return c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  }
  return op;
}

// The device that all tensors are of, besides numbers of the CPU.
c10::DeviceIndex device_of_all(const c10::FunctionSchema& schema, const std::vector<IValue>& args) {
  std::optional<c10::Device> found;
  for (const auto& arg : args) {
    for_each_tensor(arg, [&](const Tensor& t) {
      TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, "sim has no kernels for ", t.layout(), " tensors");
      if ((!is_sim(t) && t.dim() == 0) || (t.is_cpu() && takes_cpu_tensors(schema.name()))) {
        return;
      }
      TORCH_CHECK(
          is_sim(t) && (!found || *found == t.device()), schema.name(),
          ": Expected all tensors to be on the same device, but found at least two devices, ",
          found.value_or(c10::Device(kSim, 0)), " and ", t.device(), "!");
      found = t.device();
    });
  }
  for (const auto& arg : args) {
    if (!found && arg.isDevice()) {
      found = arg.toDevice();
    }
  }
  return device_at(found ? found->index() : -1).index();
}

void fallback(const c10::OperatorHandle& called, Stack* stack) {
  const auto number = called.schema().arguments().size();
  std::vector<IValue> args(stack->end() - number, stack->end());
  stack->resize(stack->size() - number);
  const auto op = on_cpu(called, args);
  const auto& schema = op.schema();

  const auto device = device_of_all(schema, args);
  const c10::DeviceGuard guard(device_at(device));
  const c10::impl::ExcludeDispatchKeyGuard below(above_kernels());

  std::vector<IValue> kernel_args;
  bool seeded = false;
  for (size_t i = 0; i < args.size(); ++i) {
    auto arg = mapped(args[i], [](const Tensor& t) { return is_sim(t) ? kernel_view(t) : cpu_copy(t); });
    if (schema.arguments()[i].name() == "generator") {
      const auto given = args[i].isNone() ? at::Generator() : args[i].toGenerator();
      const auto seed = next_kernel_seed(device, given.defined() ? &given : nullptr);
      args[i] = kernel_args.emplace_back(at::make_generator<at::CPUGeneratorImpl>(seed));
      // the trial must not draw from the one that the kernel will use
      args[i] = at::make_generator<at::CPUGeneratorImpl>(seed);
      seeded = true;
      continue;
    }
    kernel_args.push_back(arg.isDevice() ? IValue(c10::Device(c10::DeviceType::CPU)) : std::move(arg));
    if (args[i].isDevice()) {
      args[i] = kernel_args.back();
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      seeded || !op.hasTag(at::Tag::nondeterministic_seeded), "sim has no kernel for the random operator ", schema.name());

  if (depends_on_values(schema.name()) || !returns_tensors_alone(schema)) {
    return run_now(op, std::move(args), std::move(kernel_args), device, stack);
  }
  const auto plan = plan_of(op, args);
  if (!plan.possible) {
    return run_now(op, std::move(args), std::move(kernel_args), device, stack);
  }
  run_later(op, args, std::move(kernel_args), plan, device, stack);
}

// ---- memory and views

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_at(device ? device->index() : -1));
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_at(device ? device->index() : -1));
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

void grow(const Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const auto needed = at::detail::computeStorageNbytes(sizes, strides, t.dtype().itemsize(), t.storage_offset());
  if (needed > t.storage().nbytes()) {
    resize_storage(&t.storage(), needed);
  }
}

void resize_to(const Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
  grow(t, sizes, strides);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {
    const auto shaped = at::empty(size, self.options().device(at::kMeta), format);
    resize_to(self, shaped.sizes(), shaped.strides());
  } else if (format) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_storage_offset(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device().type() == kSim, "sim: set_ with a storage of ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  grow(self, self.sizes(), self.strides());
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, {length}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  at::Storage none(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_storage_offset(self, std::move(none), 0, {0}, {});
}

void record_stream(Tensor& self, c10::Stream stream) {
  allocator()->recordStream(self.storage().data_ptr(), stream);
}

// ---- copies

// A copy of the same elements in the same places; then the host's memory is used as it is, and later.
bool is_plain(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

void copy_with_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool up = is_sim(to);
  const auto& host = up ? from : to;
  const auto& ours = up ? to : from;
  const auto stream = current_stream(ours.device().index());
  count_copy(up ? "h2d" : "d2h", to.nbytes());
  const auto host_view = blob(host.data_ptr(), host); // the copy must not hold the program's tensor
  const auto source = up ? host_view : kernel_view(from), target = up ? kernel_view(to) : host_view;
  const bool pinned = is_pinned(host.data_ptr());
  enqueue(stream, "copy", [source, target] {
    const c10::impl::ExcludeDispatchKeyGuard below(above_kernels());
    target.copy_(source);
  });
  if (pinned) {
    record_pinned_use(host.data_ptr(), stream);
  }
  if (!(non_blocking && pinned && is_plain(from, to))) {
    synchronize(stream, "copy", up ? "h2d" : "d2h");
  }
}

// As CUDA copies between devices: in the stream of the source, which waits for that of the target, and is waited for.
void copy_on_device(const Tensor& from, const Tensor& to) {
  const auto stream = current_stream(from.device().index());
  const auto other = current_stream(to.device().index());
  const bool between = from.device() != to.device();
  if (between) {
    wait_in_stream(stream, record(other));
  }
  count_copy(between ? "p2p" : "d2d", to.nbytes());
  enqueue(stream, "copy", [source = kernel_view(from), target = kernel_view(to)] {
    const c10::impl::ExcludeDispatchKeyGuard below(above_kernels());
    target.copy_(source);
  });
  if (between) {
    wait_in_stream(other, record(stream));
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) {
    return to;
  }
  const c10::impl::ExcludeDispatchKeyGuard below(above_kernels());
  const auto source = from.expand(to.sizes());
  if (is_sim(from) && is_sim(to)) {
    copy_on_device(source, to);
  } else {
    copy_with_host(source, to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar read_number(const Tensor& self) {
  const auto stream = current_stream(self.device().index());
  synchronize(stream, "read", "");
  count_copy("d2h", self.element_size());
  return kernel_view(self).item();
}

// ---- the rest

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) {
    return {at::mul(input, 1), at::ones_like(input, at::kBool)};
  }
  const auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {at::mul(at::mul(input, mask), p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// Of integers it counts by the kernel for doubles, which is exact: the CPU has none for them, a card has.
void histc(const c10::OperatorHandle& op, Stack* stack) {
  auto& given = *(stack->end() - op.schema().arguments().size());
  if (!c10::isIntegralType(given.toTensor().scalar_type(), false)) {
    return fallback(op, stack);
  }
  const auto dtype = given.toTensor().scalar_type();
  given = given.toTensor().to(at::kDouble);
  fallback(op, stack);
  stack->back() = stack->back().toTensor().to(dtype);
}

// Attention by its parts: mathematically plain, and the same kernels as on the CPU.
int64_t attention_by_parts(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                           std::optional<double>, bool) {
  return 0; // sdp::SDPBackend::math
}

} // namespace

void resize_storage(const void* which, size_t bytes) {
  const auto& storage = *static_cast<const c10::Storage*>(which);
  const auto device = storage.device();
  const c10::DeviceGuard guard(device);
  auto data = allocator()->allocate(bytes);
  if (const auto kept = std::min(bytes, storage.nbytes())) {
    allocator()->copy_data(data.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_number);
  for (const auto* name : {"convolution_overrideable", "convolution_backward_overrideable"}) { // see on_cpu
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  m.impl("native_dropout", native_dropout);
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
  m.impl("_fused_sdp_choice", attention_by_parts);

  // Where the CPU has a kernel of its own beside one for all devices, the CPU's is taken: other kernels, other bits.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    const bool generic = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    if (generic && op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

} // namespace sim

// A copy takes a conjugate as it is; PyTorch would resolve it first, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::attention_by_parts)
} // namespace at::native

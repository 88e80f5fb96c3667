// What PyTorch asks of a device, and the functions for Python.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstring>
#include <random>

namespace sim {

namespace {

// What is current in this thread, as on CUDA.
thread_local c10::DeviceIndex the_device = 0;
thread_local std::array<c10::StreamId, kDevices> the_streams{};

void check_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "sim has no device ", int(index), "; it has ", int(kDevices));
}

// ---- events

struct Event {
  std::mutex mutex;
  PointPtr point; // of the last time that it was recorded
  c10::DeviceIndex device = 0;
  bool timed = false;

  PointPtr last() {
    std::lock_guard lock(mutex);
    return point;
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kSim, the_device};
  }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) { // without one it is "the current one"
      check_device(device.index());
      the_device = device.index();
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      the_device = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_at(device.index(), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::array<std::atomic<int>, kDevices> next;
    const auto index = device_at(device.index()).index();
    return stream_at(index, 1 + next[index]++ % kPoolStreams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    the_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return address_of(stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }

  bool queryStream(const c10::Stream& stream) const override {
    return is_idle(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream, "stream", "");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device_at(device).index(), "device", "");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (*event == nullptr) {
      auto* made = new Event();
      made->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
      *event = made;
    }
    auto* it = static_cast<Event*>(*event);
    auto point = sim::record(stream);
    std::lock_guard lock(it->mutex);
    it->point = std::move(point);
    it->device = stream.device_index();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_in_stream(stream, static_cast<Event*>(event)->last());
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->last()->passed();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      auto* it = static_cast<Event*>(event);
      synchronize_point(*it->last(), it->device, "event");
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "Both events must be recorded before calculating elapsed time.");
    auto *a = static_cast<Event*>(first), *b = static_cast<Event*>(second);
    TORCH_CHECK(a->timed && b->timed, "Both events must be created with argument 'enable_timing=True'.");
    const auto from = a->last(), to = b->last();
    TORCH_CHECK(
        from->passed() && to->passed(), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(to->when() - from->when()).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator()->recordStream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
const c10::impl::DeviceGuardImplInterface& guard() {
  return *c10::impl::getDeviceGuardImpl(kSim);
}

// ---- random numbers

// A seed, and how many random kernels were enqueued since it was set; its state is these two, in 16 bytes.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl({kSim, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == at::kByte, "the state of a generator of sim is 16 bytes");
    const auto* bytes = static_cast<const uint8_t*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::TensorBase state = at::detail::empty_cpu({16}, at::TensorOptions(at::kByte));
    auto* bytes = static_cast<uint8_t*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  uint64_t draw() {
    std::lock_guard lock(mutex_);
    std::seed_seq both{uint32_t(seed_), uint32_t(seed_ >> 32), uint32_t(offset_), uint32_t(offset_ >> 32)};
    ++offset_;
    std::array<uint32_t, 2> mixed;
    both.generate(mixed.begin(), mixed.end());
    return mixed[0] | uint64_t(mixed[1]) << 32;
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto& made = *new std::array<at::Generator, kDevices>{
      at::make_generator<Generator>(c10::DeviceIndex(0)), at::make_generator<Generator>(c10::DeviceIndex(1))};
  return made.at(device_at(device).index());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return is_begun();
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    guard().setDevice({kSim, device});
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return the_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return guard().exchangeDevice({kSim, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device_at(device).index());
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kSim, device_of(data)};
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(&storage, bytes);
  }
};

// ---- for Python

std::string stack_of_python() {
  if (!Py_IsInitialized()) {
    return "";
  }
  py::gil_scoped_acquire gil;
  return py::str("").attr("join")(py::module_::import("traceback").attr("format_stack")()).cast<std::string>();
}

void release_gil(const std::function<void()>& wait) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release released;
    wait();
  } else {
    wait();
  }
}

py::dict counts_for_python() {
  const auto now = counts();
  py::dict syncs, ops, copies, all;
  for (const auto* kind : {"stream", "device", "event", "read", "copy", "op", "allocator"}) {
    const auto found = now.syncs.find(kind);
    syncs[kind] = found == now.syncs.end() ? 0 : found->second;
  }
  for (const auto& [name, number] : now.synchronizing_ops) {
    ops[name.c_str()] = number;
  }
  for (const auto* direction : {"h2d", "d2h", "d2d", "p2p"}) {
    const auto found = now.copies.find(direction);
    const auto of = found == now.copies.end() ? Copies{} : found->second;
    copies[direction] = py::make_tuple(of.number, of.bytes);
  }
  all["syncs"] = syncs;
  all["synchronizing_ops"] = ops;
  all["copies"] = copies;
  all["kernels"] = now.kernels;
  all["where"] = now.where;
  return all;
}

} // namespace

c10::Device device_at(c10::DeviceIndex index) {
  if (index < 0) {
    index = the_device;
  }
  check_device(index);
  return {kSim, index};
}

c10::Stream current_stream(c10::DeviceIndex device) {
  const auto index = device_at(device).index();
  return stream_at(index, the_streams[index]);
}

uint64_t next_kernel_seed(c10::DeviceIndex device, const void* given) {
  const auto& generator = given ? *static_cast<const at::Generator*>(given) : default_generator(device);
  TORCH_CHECK(
      generator.device() == c10::Device(kSim, device), "Expected a '", c10::Device(kSim, device),
      "' device type for generator but found '", generator.device(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->draw();
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  without_gil = release_gil;
  python_stack = stack_of_python;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kSim, allocator());

  add_driver(m);
  m.def("set_seed", &set_seed);
  m.def("set_delays", &set_delays);
  m.def("hold", [](c10::Stream stream) { hold(stream); });
  m.def("release", [](c10::Stream stream) { release(stream); });
  m.def("counts", &counts_for_python);
  m.def("reset_counts", &reset_counts);
  m.def("set_tracing", &set_tracing);
  m.def("set_limit", &set_limit);
  m.def("shut_down", &shut_down);
  m.def("default_generator", [](c10::DeviceIndex device) { return default_generator(device); });
  m.def("default_stream", [](c10::DeviceIndex device) { return stream_at(device, 0); });
  m.def("is_usable", &is_usable);
  m.def("is_begun", &is_begun);
  m.def("begin", &begin);
}

} // namespace sim

// The driver of the simulated device: what `kedge.native.driver` and C call of CUDA's, under its names.
//
// A launch is checked when it is made - its context is current, its stream is of the device that its memory is on, and all
// memory is alive - and recorded; the rows are computed later, in the thread of the stream, as the kernel in
// statistics.cu would compute them.
#include "device.h"

#include "work.h"

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace sim {

namespace {

enum Format { kFloat32, kFloat64, kFloat16, kBFloat16 };
enum What { kFull, kNorm, kFinite, kDraw };
constexpr int kBuckets = 83, kLowest = -48, kDrawn = 256;
constexpr uintptr_t kContexts = 0x1000;

thread_local std::vector<void*> contexts;
std::atomic<bool> capturing{false};
std::atomic<int> failing{0}; // what the next launches return
std::atomic<uint64_t> launches{0}, fills{0};

void* context_of(c10::DeviceIndex device) {
  return reinterpret_cast<void*>(kContexts + device);
}

c10::Stream stream_of(void* address) {
  const auto code = reinterpret_cast<uintptr_t>(address);
  return stream_at(static_cast<c10::DeviceIndex>(code >> 16), static_cast<c10::StreamId>(code & 0xffff) - 1);
}

size_t width_of(int format) {
  return format == kFloat64 ? 8 : format == kFloat32 ? 4 : 2;
}

double number_at(const char* at, int format) {
  switch (format) {
    case kFloat32:
      return *reinterpret_cast<const float*>(at);
    case kFloat64:
      return *reinterpret_cast<const double*>(at);
    case kFloat16:
      return static_cast<float>(*reinterpret_cast<const c10::Half*>(at));
    default:
      return static_cast<float>(*reinterpret_cast<const c10::BFloat16*>(at));
  }
}

int64_t place_of(const Work& work, int64_t index) {
  if (work.dims == 0) {
    return index;
  }
  int64_t place = 0;
  for (int d = work.dims - 1; d >= 0; --d) {
    place += index % work.size[d] * work.stride[d];
    index /= work.size[d];
  }
  return place;
}

// What is read and written, as kernels see it.
struct Opened {
  const char* numbers;
  double* row;
  unsigned short* drawn;
  unsigned char* active;
};

void draw(const Work& work, const Opened& opened, int format) {
  std::memset(opened.drawn, 0, sizeof(unsigned short) * (kBuckets + 1));
  for (int64_t index = 0, n = 0; index < work.count && n < kDrawn; index += work.distance, ++n) {
    const auto x = number_at(opened.numbers + place_of(work, index) * width_of(format), format);
    const auto narrow = static_cast<float>(x);
    uint32_t bits;
    std::memcpy(&bits, &narrow, sizeof bits);
    bits &= 0x7fffffff;
    const int exponent = bits >> 23;
    if (bits != 0 && exponent != 255) {
      const int bucket = exponent - 127 - kLowest + 2;
      ++opened.drawn[exponent == 0 ? 0 : std::min(std::max(bucket, 1), kBuckets - 1)];
    }
    opened.drawn[kBuckets] += x <= work.low || x >= work.high;
  }
}

void run(const Work& work, const Opened& opened, int format) {
  if (opened.drawn != nullptr) {
    draw(work, opened, format);
  }
  if (work.what == kDraw) {
    return;
  }
  constexpr auto infinity = std::numeric_limits<double>::infinity(), missing = std::numeric_limits<double>::quiet_NaN();
  double sum = 0, squares = 0, low = infinity, high = -infinity, nonzero = 0, nonfinite = 0, nan = 0;
  for (int64_t index = 0; index < work.count; ++index) {
    const auto x = number_at(opened.numbers + place_of(work, index) * width_of(format), format);
    sum += x;
    squares += x * x;
    low = x < low ? x : low;
    high = x > high ? x : high;
    nonzero += x != 0;
    nonfinite += !std::isfinite(x);
    nan += std::isnan(x);
    if (opened.active != nullptr && x > 0) {
      opened.active[index / work.inner % work.channels] = 1;
    }
  }
  const bool full = work.what == kFull, squared = work.what != kFinite, single = work.count == 1 && work.repeats == 1;
  const auto repeats = static_cast<double>(work.repeats);
  const double row[ROW] = {
      work.what != kNorm || single ? sum * repeats : missing,
      squared ? squares * repeats : missing,
      full && nan == 0 ? low : missing,
      full && nan == 0 ? high : missing,
      full ? nonzero * repeats : missing,
      squared ? nonfinite * repeats : missing,
      squared ? nan * repeats : missing,
      1e-6};
  std::memcpy(opened.row, row, sizeof row);
}

template <typename T>
T* opened_at(T* address, c10::DeviceIndex device) {
  return address == nullptr ? nullptr : static_cast<T*>(opened(address, device));
}

} // namespace

void add_driver(pybind11::module_& module) {
  module.def("driver_launches", [] { return launches.load(); });
  module.def("driver_fills", [] { return fills.load(); });
  module.def("reset_driver", [] { launches = fills = 0; });
  module.def("set_capturing", [](bool on) { capturing = on; });
  module.def("fail_launches", [](int with) { failing = with; });
}

} // namespace sim

EXPORTED int cuDeviceGet(int* device, int index) {
  *device = index;
  return index >= 0 && index < sim::kDevices ? 0 : 101;
}

EXPORTED int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = sim::context_of(device);
  return 0;
}

EXPORTED int cuCtxGetCurrent(void** context) {
  *context = sim::contexts.empty() ? nullptr : sim::contexts.back();
  return 0;
}

EXPORTED int cuCtxPushCurrent_v2(void* context) {
  sim::contexts.push_back(context);
  return 0;
}

EXPORTED int cuCtxPopCurrent_v2(void** context) {
  *context = sim::contexts.back();
  sim::contexts.pop_back();
  return 0;
}

EXPORTED int cuModuleLoadData(void** module, const char* image) {
  *module = reinterpret_cast<void*>(1);
  return std::strstr(image, ".entry") == nullptr || sim::contexts.empty();
}

EXPORTED int cuModuleGetFunction(void** function, void*, const char* name) {
  const char* names[] = {"statistics_float32", "statistics_float64", "statistics_float16", "statistics_bfloat16"};
  for (uintptr_t format = 0; format < 4; ++format) {
    if (std::strcmp(name, names[format]) == 0) {
      *function = reinterpret_cast<void*>(format + 1);
      return 0;
    }
  }
  return 500;
}

EXPORTED int cuStreamIsCapturing(void*, int* status) {
  *status = sim::capturing;
  return 0;
}

// What PyTorch tells C of a CUDA device.
EXPORTED int sim_current_stream(int, int32_t index, void** stream) {
  const auto current = sim::current_stream(static_cast<c10::DeviceIndex>(index));
  *stream = reinterpret_cast<void*>(static_cast<uintptr_t>(index) << 16 | static_cast<uintptr_t>(current.id() + 1));
  return 0;
}

EXPORTED int cuMemsetD8Async(uint64_t address, unsigned char byte, size_t bytes, void* stream_address) {
  const auto stream = sim::stream_of(stream_address);
  auto* to = reinterpret_cast<void*>(address);
  if (sim::device_of(to) != stream.device_index()) {
    return 700;
  }
  ++sim::fills;
  sim::enqueue(stream, "fill", [=] { std::memset(sim::opened(to, stream.device_index()), byte, bytes); });
  return 0;
}

EXPORTED int cuLaunchKernel(
    void* kernel, unsigned, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned, void* stream_address,
    void** arguments, void**) {
  if (sim::failing != 0) {
    return sim::failing;
  }
  const auto& work = *static_cast<const Work*>(arguments[0]);
  const auto stream = sim::stream_of(stream_address);
  const auto device = stream.device_index();
  const int format = static_cast<int>(reinterpret_cast<uintptr_t>(kernel)) - 1;
  if (sim::contexts.empty() || sim::contexts.back() != sim::context_of(device) || threads != 256) {
    return 201;
  }
  for (const void* address : {work.numbers, static_cast<const void*>(work.row), static_cast<const void*>(work.drawn)}) {
    if (address != nullptr && sim::device_of(address) != device) {
      return 700;
    }
  }
  ++sim::launches;
  sim::count_kernel();
  sim::enqueue(stream, "statistics", [work, device, format] {
    sim::run(
        work,
        {static_cast<const char*>(sim::opened(work.numbers, device)),
         sim::opened_at(work.row, device),
         sim::opened_at(work.drawn, device),
         sim::opened_at(work.active, device)},
        format);
  });
  return 0;
}

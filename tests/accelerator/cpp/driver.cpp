// The driver of the simulated device: what `kedge.native` calls of CUDA's driver, and of HIP's runtime and compiler, under
// their names.
//
// A launch is checked when it is made - its device is current, its stream is of the device that its memory is on, and all
// memory is alive - and recorded; the rows are computed later, in the thread of the stream: CUDA's by the function below, as
// the kernel in statistics.cu would compute them, and HIP's by the source of that kernel.
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

thread_local void* the_context = nullptr; // of CUDA's
thread_local int the_number = 0; // of HIP's device
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
  double* parts;
  unsigned* arrived;
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

// Checks a launch, records it, and has it run later.
int launch(
    unsigned threads, void* stream_address, void** arguments, c10::DeviceIndex current,
    const std::function<void(const Work&, const Opened&)>& kernel);

template <typename T>
T* opened_at(T* address, c10::DeviceIndex device) {
  return address == nullptr ? nullptr : static_cast<T*>(opened(address, device));
}

int launch(
    unsigned threads, void* stream_address, void** arguments, c10::DeviceIndex current,
    const std::function<void(const Work&, const Opened&)>& kernel) {
  if (failing != 0) {
    return failing;
  }
  const auto& work = *static_cast<const Work*>(arguments[0]);
  const auto stream = stream_of(stream_address);
  const auto device = stream.device_index();
  if (current != device || threads != 256) {
    return 201;
  }
  for (const void* address : {work.numbers, static_cast<const void*>(work.row), static_cast<const void*>(work.drawn)}) {
    if (address != nullptr && device_of(address) != device) {
      return 700;
    }
  }
  ++launches;
  count_kernel();
  enqueue(stream, "statistics", [work, device, kernel] {
    kernel(
        work,
        {static_cast<const char*>(opened(work.numbers, device)),
         opened_at(work.row, device),
         opened_at(work.drawn, device),
         opened_at(work.active, device),
         opened_at(work.parts, device),
         opened_at(work.arrived, device)});
  });
  return 0;
}

int fill(void* to, unsigned char byte, size_t bytes, void* stream_address) {
  const auto stream = stream_of(stream_address);
  if (device_of(to) != stream.device_index()) {
    return 700;
  }
  ++fills;
  enqueue(stream, "fill", [=] { std::memset(opened(to, stream.device_index()), byte, bytes); });
  return 0;
}

// Numbers from 0 on for the kernels by their names, as Kind in C; -1 for others.
int format_of(const char* name) {
  const char* names[] = {"statistics_float32", "statistics_float64", "statistics_float16", "statistics_bfloat16"};
  for (int format = 0; format < 4; ++format) {
    if (std::strcmp(name, names[format]) == 0) {
      return format;
    }
  }
  return -1;
}

// What hiprtc makes: it does not compile, but looks whether it was given what it needs.
struct Program {
  std::string source, header, code, log;
};

} // namespace

void* address_of(c10::Stream stream) {
  return reinterpret_cast<void*>(
      static_cast<uintptr_t>(stream.device_index()) << 16 | static_cast<uintptr_t>(stream.id() + 1));
}

void add_driver(pybind11::module_& module) {
  module.def("driver_launches", [] { return launches.load(); });
  module.def("driver_fills", [] { return fills.load(); });
  module.def("reset_driver", [] { launches = fills = 0; });
  module.def("set_capturing", [](bool on) { capturing = on; });
  module.def("hip_device", [] { return the_number; });
  module.def("fail_launches", [](int with) { failing = with; });
}

} // namespace sim

// ---- CUDA's

EXPORTED int cuDeviceGet(int* device, int index) {
  *device = index;
  return index >= 0 && index < sim::kDevices ? 0 : 101;
}

EXPORTED int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = sim::context_of(device);
  return 0;
}

EXPORTED int cuCtxGetCurrent(void** context) {
  *context = sim::the_context;
  return 0;
}

EXPORTED int cuCtxSetCurrent(void* context) {
  sim::the_context = context;
  return 0;
}

EXPORTED int cuModuleLoadData(void** module, const char* image) {
  *module = reinterpret_cast<void*>(1);
  return std::strstr(image, ".entry") == nullptr || sim::the_context == nullptr;
}

EXPORTED int cuModuleGetFunction(void** function, void*, const char* name) {
  const int format = sim::format_of(name);
  *function = reinterpret_cast<void*>(static_cast<uintptr_t>(format + 1));
  return format < 0 ? 500 : 0;
}

EXPORTED int cuStreamIsCapturing(void*, int* status) {
  *status = sim::capturing;
  return 0;
}

// What PyTorch tells C of a CUDA device.
EXPORTED int sim_current_stream(int, int32_t index, void** stream) {
  *stream = sim::address_of(sim::current_stream(static_cast<c10::DeviceIndex>(index)));
  return 0;
}

// The same by a build of PyTorch that was not made for it.
EXPORTED int sim_default_stream(int, int32_t index, void** stream) {
  *stream = sim::address_of(sim::stream_at(static_cast<c10::DeviceIndex>(index), 0));
  return 0;
}

EXPORTED int cuMemsetD8Async(uint64_t address, unsigned char byte, size_t bytes, void* stream) {
  return sim::fill(reinterpret_cast<void*>(address), byte, bytes, stream);
}

EXPORTED int cuLaunchKernel(
    void* kernel, unsigned, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned, void* stream,
    void** arguments, void**) {
  const int format = static_cast<int>(reinterpret_cast<uintptr_t>(kernel)) - 1;
  const auto current = static_cast<c10::DeviceIndex>(reinterpret_cast<uintptr_t>(sim::the_context) - sim::kContexts);
  return sim::launch(threads, stream, arguments, current, [format](const Work& work, const sim::Opened& opened) {
    sim::run(work, opened, format);
  });
}

// ---- HIP's

EXPORTED int hipGetDevice(int* device) {
  *device = sim::the_number;
  return 0;
}

EXPORTED int hipSetDevice(int device) {
  if (device < 0 || device >= sim::kDevices) {
    return 101;
  }
  sim::the_number = device;
  return 0;
}

EXPORTED int hipDeviceGetAttribute(int* value, int attribute, int) {
  *value = 100000; // kHz
  return attribute == 10017 ? 0 : 1;
}

EXPORTED int hipDrvGetErrorString(int, const char** text) {
  *text = "it is not one of its own";
  return 0;
}

EXPORTED int hipModuleLoadData(void** module, const char* image) {
  const auto is_wide = std::strstr(image, "code for gfx9") == image;
  *module = reinterpret_cast<void*>(static_cast<uintptr_t>(is_wide ? 64 : 32));
  return std::strstr(image, "code for gfx") == image ? 0 : 200;
}

EXPORTED int hipModuleGetFunction(void** function, void* module, const char* name) {
  const int format = sim::format_of(name);
  *function = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(module) << 8 | static_cast<uintptr_t>(format + 1));
  return format < 0 ? 500 : 0;
}

EXPORTED int hipStreamIsCapturing(void* stream, int* status) {
  return cuStreamIsCapturing(stream, status);
}

EXPORTED int hipMemsetD8Async(void* to, unsigned char byte, size_t bytes, void* stream) {
  return sim::fill(to, byte, bytes, stream);
}

EXPORTED int hipModuleLaunchKernel(
    void* kernel, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned, void* stream,
    void** arguments, void**) {
  const auto code = reinterpret_cast<uintptr_t>(kernel);
  const auto current = static_cast<c10::DeviceIndex>(sim::the_number);
  return sim::launch(threads, stream, arguments, current, [=](Work work, const sim::Opened& opened) {
    work.numbers = opened.numbers;
    work.row = opened.row;
    work.drawn = opened.drawn;
    work.active = opened.active;
    work.parts = opened.parts;
    work.arrived = opened.arrived;
    sim::run_kernel(static_cast<int>(code & 0xff) - 1, work, blocks, static_cast<unsigned>(code >> 8));
  });
}

// ---- its compiler's

EXPORTED int hiprtcCreateProgram(
    sim::Program** program, const char* source, const char*, int headers, const char** header, const char** name) {
  if (headers != 1 || std::strcmp(name[0], "work.h") != 0) {
    return 1;
  }
  *program = new sim::Program{source, header[0]};
  return 0;
}

EXPORTED int hiprtcCompileProgram(sim::Program* program, int count, const char** options) {
  const std::string first = count > 0 ? options[0] : "", begins = "--offload-arch=";
  const bool is_whole = program->source.find("KERNEL(statistics_bfloat16)") != std::string::npos &&
      program->header.find("} Work;") != std::string::npos;
  if (first.rfind(begins, 0) != 0 || !is_whole) {
    program->log = "In file included from statistics.cu:\nstatistics.cu:1:1: error: it is not whole\n";
    return 6;
  }
  program->code = "code for " + first.substr(begins.size());
  return 0;
}

EXPORTED int hiprtcGetProgramLogSize(sim::Program* program, size_t* size) {
  *size = program->log.size() + 1;
  return 0;
}

EXPORTED int hiprtcGetProgramLog(sim::Program* program, char* log) {
  std::memcpy(log, program->log.c_str(), program->log.size() + 1);
  return 0;
}

EXPORTED int hiprtcGetCodeSize(sim::Program* program, size_t* size) {
  *size = program->code.size();
  return 0;
}

EXPORTED int hiprtcGetCode(sim::Program* program, char* code) {
  std::memcpy(code, program->code.data(), program->code.size());
  return 0;
}

EXPORTED int hiprtcDestroyProgram(sim::Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}

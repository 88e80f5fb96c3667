// A simulated accelerator: what its parts know of each other.
//
//   streams.cpp      streams that run later, each in a thread; events; delays; what is counted
//   memory.cpp       memory that the host cannot read; a caching allocator; pinned memory of the host
//   kernels.cpp      operators: each one runs on the CPU's kernel, later, in the thread of its stream
//   registration.cpp what PyTorch asks of a device: guard, hooks, generators; and the functions for Python
//   cells.cpp        the cells of recurrent networks
//   autocast.cpp     automatic mixed precision
//   driver.cpp       the functions of CUDA's driver and of HIP's runtime that Kedge launches its kernel with
//   wavefronts.cpp   a card of HIP's that runs the kernel
//
// Invariants, all there so that a program's missing wait shows, and nothing but a program's mistake does:
//  * A task in a stream holds addresses, never a tensor of the device. So memory may be freed, and given away again, while
//    a task that uses it waits, as on a real card. And a thread of a stream never frees a Python object: it needs no GIL.
//  * Nothing starts a thread or maps memory before the device is used: a process that has loaded it may fork.
//  * Locks are taken in this order: allocator, stream. Nobody waits for a stream while holding one.
#pragma once

#include "work.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace pybind11 {
class module_;
}

namespace c10 {
struct DeviceAllocator;
struct Allocator;
} // namespace c10

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr int kPoolStreams = 32; // besides the default stream, as on CUDA; handed out in turn

// ---- streams.cpp

// A place in a stream. It is passed once, when all that was enqueued before it has run.
class Point {
 public:
  void pass();
  bool passed() const;
  void wait() const;
  std::chrono::steady_clock::time_point when() const; // only of a point that is passed

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool passed_ = false;
  std::chrono::steady_clock::time_point when_;
};
using PointPtr = std::shared_ptr<Point>;

c10::Device device_at(c10::DeviceIndex index); // -1 is the current one
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream stream_at(c10::DeviceIndex device, c10::StreamId id);

void enqueue(c10::Stream stream, std::string name, std::function<void()> task);
PointPtr record(c10::Stream stream);
void wait_in_stream(c10::Stream stream, PointPtr point);
bool is_idle(c10::Stream stream);

bool is_usable(); // not in a fork of the process that used the device
bool is_begun(); // whether this process has used it
void begin(); // use it: whatever is enqueued does; raises where it is not usable

// Waits of the host. Each raises what failed on the device, once; `kind` is the row of counts() in which it counts, if any.
void synchronize(c10::Stream stream, const char* kind, const std::string& what);
void synchronize_device(c10::DeviceIndex device, const char* kind, const std::string& what);
void synchronize_point(const Point& point, c10::DeviceIndex device, const char* kind);

// A stream that is held runs nothing until it is released: for tests that need one certain order.
void hold(c10::Stream stream);
void release(c10::Stream stream);

void set_seed(uint64_t seed); // of the delays
void set_delays(bool on);
void shut_down(); // ends the threads; what is enqueued later is dropped

// Wait without the GIL, if this thread has it: a kernel that is written in Python takes it in the thread of its stream.
extern void (*without_gil)(const std::function<void()>& wait);
extern std::string (*python_stack)();

struct Copies {
  uint64_t number = 0, bytes = 0;
};
struct Counts {
  std::map<std::string, uint64_t> syncs; // by kind
  std::map<std::string, uint64_t> synchronizing_ops; // by operator; they are among the syncs as "op"
  std::map<std::string, Copies> copies; // by direction
  uint64_t kernels = 0;
  std::vector<std::array<std::string, 3>> where; // kind, what, Python's stack; while that is on
};
Counts counts();
void reset_counts();
void set_tracing(bool on);
void count_copy(const char* direction, size_t bytes);
void count_kernel();

// ---- memory.cpp

// The tensors' addresses cannot be read. This is where the same byte can be, by kernels.
void* opened(const void* address, c10::DeviceIndex device);
c10::DeviceAllocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
void record_pinned_use(const void* address, c10::Stream stream);
c10::DeviceIndex device_of(const void* address); // raises if it is not of a device
void set_limit(c10::DeviceIndex device, size_t bytes);

// ---- kernels.cpp

void resize_storage(const void* storage, size_t bytes); // a c10::Storage

// ---- registration.cpp

// The seed of the next random operator's kernel: fixed when it is enqueued, whenever it runs.
uint64_t next_kernel_seed(c10::DeviceIndex device, const void* generator); // an at::Generator or null

// ---- driver.cpp

void add_driver(pybind11::module_& module);
void* address_of(c10::Stream stream);

// ---- wavefronts.cpp

void run_kernel(int format, const Work& work, unsigned blocks, unsigned wavefront);

} // namespace sim

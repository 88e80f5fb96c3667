// Streams that run later, events, and the count of every wait.
#include "device.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <deque>
#include <optional>
#include <random>
#include <thread>

namespace sim {

void (*without_gil)(const std::function<void()>& wait) = nullptr;
std::string (*python_stack)() = nullptr;

namespace {

struct Task {
  std::string name;
  std::function<void()> run;
};

std::atomic<uint64_t> delay_seed{0};
std::atomic<uint64_t> seeding{0}; // counts calls of set_seed, so that each stream begins anew
std::atomic<bool> delays{true};
std::atomic<bool> ended{false};
std::atomic<pid_t> process{0}; // that used the device first: a fork of it has neither its threads nor its memory

std::mutex failure_mutex;
std::array<std::optional<std::string>, kDevices> failures; // the first of each device that was not reported yet

void keep_failure(c10::DeviceIndex device, std::string message) {
  std::lock_guard lock(failure_mutex);
  if (!failures[device]) {
    failures[device] = std::move(message);
  }
}

void raise_failure(c10::DeviceIndex device) {
  std::optional<std::string> failure;
  {
    std::lock_guard lock(failure_mutex);
    failure.swap(failures[device]);
  }
  TORCH_CHECK(!failure, *failure);
}

// A stream: tasks, and a thread that runs them one after another, each after a random delay.
class Queue {
 public:
  Queue(c10::DeviceIndex device, int id) : device_(device), id_(id) {}

  void push(Task task) {
    std::lock_guard lock(mutex_);
    if (ended) {
      return;
    }
    begin();
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { work(); });
    }
    tasks_.push_back(std::move(task));
    ++pushed_;
    changed_.notify_all();
  }

  // Wait until all that is enqueued now has run.
  void drain() {
    std::unique_lock lock(mutex_);
    TORCH_CHECK(
        !held_ || holder_ != std::this_thread::get_id(), "sim: this thread waits for a stream that it holds itself");
    const auto target = pushed_;
    changed_.wait(lock, [&] { return done_ >= target; });
  }

  bool idle() {
    std::lock_guard lock(mutex_);
    return done_ == pushed_;
  }

  void set_held(bool held) {
    std::lock_guard lock(mutex_);
    held_ = held;
    holder_ = std::this_thread::get_id();
    changed_.notify_all();
  }

  void end() {
    {
      std::lock_guard lock(mutex_);
      held_ = false;
      ended = true;
      changed_.notify_all();
    }
    if (thread_.joinable() && is_usable()) {
      thread_.join();
    }
  }

 private:
  void work() {
    prctl(PR_SET_TIMERSLACK, 1); // or each sleep is 50 microseconds longer than asked for
    at::init_num_threads(); // as many threads as the program wants; a new thread would take all cores
    for (;;) {
      Task task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !held_ && (ended || !tasks_.empty()); });
        if (tasks_.empty()) {
          return;
        }
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      delay();
      try {
        task.run();
      } catch (const c10::Error& error) {
        failed(task, error.what_without_backtrace());
      } catch (const std::exception& error) {
        failed(task, error.what());
      }
      task.run = nullptr; // frees what it holds before anybody hears that it is done
      std::lock_guard lock(mutex_);
      ++done_;
      changed_.notify_all();
    }
  }

  void failed(const Task& task, const std::string& why) {
    keep_failure(
        device_,
        "sim:" + std::to_string(device_) + ", stream " + std::to_string(id_) + ": " + task.name +
            " failed after it was enqueued: " + why);
  }

  // Mostly nothing (on a busy machine each sleep costs a turn of the scheduler), at times long enough that every other
  // stream, and the host, overtakes this one. With each seed other streams are quick or slow throughout.
  void delay() {
    if (!delays || ended) {
      return;
    }
    if (seeded_ != seeding) {
      seeded_ = seeding;
      random_.seed(delay_seed * 1000003 + device_ * 1009 + id_);
      factor_ = std::array{0, 1, 1, 8}[random_() % 4];
    }
    const auto draw = random_() % 512;
    const auto microseconds = factor_ == 0 || draw < 416 ? 0 : draw < 510 ? draw % 128 * factor_ : 2000;
    if (microseconds != 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    }
  }

  const c10::DeviceIndex device_;
  const int id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t pushed_ = 0, done_ = 0;
  bool held_ = false;
  std::thread::id holder_;
  std::thread thread_;
  std::mt19937_64 random_;
  uint64_t seeded_ = ~0ULL;
  int factor_ = 1;
};

// Never destroyed: tensors are freed until the very end of a process, after static objects.
Queue& queue(c10::Stream stream) {
  static auto& queues = *[] {
    auto* made = new std::array<std::vector<std::unique_ptr<Queue>>, kDevices>();
    for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
      for (int id = 0; id <= kPoolStreams; ++id) {
        (*made)[device].push_back(std::make_unique<Queue>(device, id));
      }
    }
    return made;
  }();
  TORCH_CHECK(stream.device_type() == c10::DeviceType::PrivateUse1, "a stream of sim is needed, this is ", stream);
  TORCH_CHECK(stream.id() >= 0 && stream.id() <= kPoolStreams, "sim has no stream ", stream.id());
  return *queues.at(stream.device_index()).at(stream.id());
}

std::mutex count_mutex;
Counts counted;
bool tracing = false;

void count_sync(const char* kind, const std::string& what) {
  if (kind == nullptr) {
    return;
  }
  bool traced = false;
  {
    std::lock_guard lock(count_mutex);
    ++counted.syncs[kind];
    if (std::string_view(kind) == "op") {
      ++counted.synchronizing_ops[what];
    }
    traced = tracing;
  }
  if (traced && python_stack) {
    auto stack = python_stack(); // takes the GIL: not while holding a lock
    std::lock_guard lock(count_mutex);
    counted.where.push_back({kind, what, std::move(stack)});
  }
}

void wait_for(const std::function<void()>& wait) {
  without_gil ? without_gil(wait) : wait();
}

} // namespace

void Point::pass() {
  std::lock_guard lock(mutex_);
  when_ = std::chrono::steady_clock::now();
  passed_ = true;
  changed_.notify_all();
}

bool Point::passed() const {
  std::lock_guard lock(mutex_);
  return passed_;
}

void Point::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return passed_; });
}

std::chrono::steady_clock::time_point Point::when() const {
  std::lock_guard lock(mutex_);
  return when_;
}

bool is_usable() {
  const pid_t first = process;
  return first == 0 || first == getpid();
}

bool is_begun() {
  return process == getpid();
}

void begin() {
  pid_t nobody = 0;
  process.compare_exchange_strong(nobody, getpid());
  TORCH_CHECK(
      is_usable(), "sim was used before this process was forked: its streams have no threads here. Fork before the first use");
}

c10::Stream stream_at(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

void enqueue(c10::Stream stream, std::string name, std::function<void()> task) {
  queue(stream).push({std::move(name), std::move(task)});
}

PointPtr record(c10::Stream stream) {
  auto point = std::make_shared<Point>();
  enqueue(stream, "record", [point] { point->pass(); });
  return point;
}

void wait_in_stream(c10::Stream stream, PointPtr point) {
  enqueue(stream, "wait", [point = std::move(point)] { point->wait(); });
}

bool is_idle(c10::Stream stream) {
  return queue(stream).idle();
}

void synchronize(c10::Stream stream, const char* kind, const std::string& what) {
  count_sync(kind, what);
  wait_for([&] { queue(stream).drain(); });
  raise_failure(stream.device_index());
}

void synchronize_device(c10::DeviceIndex device, const char* kind, const std::string& what) {
  count_sync(kind, what);
  wait_for([&] {
    for (int id = 0; id <= kPoolStreams; ++id) {
      queue(stream_at(device, id)).drain();
    }
  });
  raise_failure(device);
}

void synchronize_point(const Point& point, c10::DeviceIndex device, const char* kind) {
  count_sync(kind, "");
  wait_for([&] { point.wait(); });
  raise_failure(device);
}

void hold(c10::Stream stream) {
  queue(stream).set_held(true);
}

void release(c10::Stream stream) {
  queue(stream).set_held(false);
}

void set_seed(uint64_t seed) {
  delay_seed = seed;
  ++seeding;
}

void set_delays(bool on) {
  delays = on;
}

void shut_down() {
  wait_for([] {
    for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
      for (int id = 0; id <= kPoolStreams; ++id) {
        queue(stream_at(device, id)).end();
      }
    }
  });
}

Counts counts() {
  std::lock_guard lock(count_mutex);
  return counted;
}

void reset_counts() {
  std::lock_guard lock(count_mutex);
  counted = {};
}

void set_tracing(bool on) {
  std::lock_guard lock(count_mutex);
  tracing = on;
}

void count_copy(const char* direction, size_t bytes) {
  std::lock_guard lock(count_mutex);
  auto& copies = counted.copies[direction];
  ++copies.number;
  copies.bytes += bytes;
}

void count_kernel() {
  std::lock_guard lock(count_mutex);
  ++counted.kernels;
}

} // namespace sim

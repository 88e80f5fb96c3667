// Memory that the host cannot read by accident, a caching allocator for it, and pinned memory of the host.
#include "device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <set>

namespace sim {

namespace {

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
using Streams = std::set<c10::StreamId>;

constexpr size_t kArena = size_t(16) << 30; // of addresses; pages come as they are written
constexpr int kPoison = 0xFF; // as floating point NaN, as an integer -1

size_t rounded(size_t bytes) {
  return (bytes + 511) / 512 * 512; // of an address, too: as far as any kernel's vectors go
}

// The memory of one device, seen twice: at the tensors' addresses nothing can be read or written, by the kernels' all.
class Arena {
 public:
  Arena() {
    const int file = memfd_create("sim", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "sim: no memory for a device");
    file_ = file;
    guarded_ = map(PROT_NONE);
    opened_ = map(PROT_READ | PROT_WRITE);
    free_[0] = kArena;
  }

  bool holds(const void* address) const {
    const auto* byte = static_cast<const char*>(address);
    return byte >= guarded_ && byte < guarded_ + kArena;
  }
  char* opened(const void* address) const {
    return opened_ + (static_cast<const char*>(address) - guarded_);
  }

  // The first range that is large enough, or null.
  void* take(size_t bytes) {
    TORCH_CHECK(is_usable(), "sim was used before this process was forked: its memory is the parent's");
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      const auto [start, size] = *range;
      if (size >= bytes) {
        free_.erase(range);
        if (size > bytes) {
          free_[start + bytes] = size - bytes;
        }
        return guarded_ + start;
      }
    }
    return nullptr;
  }

  void give_back(void* address, size_t bytes) {
    size_t start = static_cast<char*>(address) - guarded_;
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start, bytes);
    auto next = free_.lower_bound(start);
    if (next != free_.end() && next->first == start + bytes) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == start) {
        before->second += bytes;
        return;
      }
    }
    free_[start] = bytes;
  }

 private:
  char* map(int protection) {
    void* address = mmap(nullptr, kArena, protection, MAP_SHARED | MAP_NORESERVE, file_, 0);
    TORCH_CHECK(address != MAP_FAILED, "sim: no addresses for a device");
    return static_cast<char*>(address);
  }

  int file_;
  char *guarded_, *opened_;
  std::map<size_t, size_t> free_; // start and size of what was never taken, or was given back
};

struct Block {
  void* address;
  size_t size; // of the block, which may be more than was asked for
  size_t asked; // rounded
  c10::Stream stream; // on which it was allocated, and is reused
  Streams users; // other streams, by record_stream
  std::vector<PointPtr> points; // of those when it was freed
};

void free_block(void* context);

// As CUDA's caching allocator: a freed block can be had again at once on its own stream, whose order makes that safe. Where
// other streams were recorded, it can only when they have passed the points at which they stood when it was freed.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = device_at(-1);
    if (bytes == 0) {
      return {nullptr, nullptr, &free_block, device};
    }
    auto* block = take(rounded(bytes), device.index());
    return {block->address, block, &free_block, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // a pointer without its block is not enough to free it
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    const auto device = device_of(to);
    enqueue(current_stream(device), "copy", [to = opened(to, device), from = opened(from, device), bytes] {
      std::memcpy(to, from, bytes);
    });
  }

  void release(Block* block) {
    std::lock_guard lock(mutex_);
    auto& of = devices_[block->stream.device_index()];
    count(of.stats.allocated_bytes, -static_cast<int64_t>(block->asked));
    count(of.stats.allocation, -1);
    for (const auto id : block->users) {
      block->points.push_back(record(stream_at(block->stream.device_index(), id)));
    }
    of.freed.push_back(block);
    reap(of);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
      flush(device);
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get() == nullptr || pointer.get_deleter() != &free_block) {
      return;
    }
    auto* block = static_cast<Block*>(pointer.get_context());
    std::lock_guard lock(mutex_);
    if (block->stream != stream) {
      TORCH_CHECK(stream.device() == block->stream.device(), "record_stream: the tensor is of another device than ", stream);
      block->users.insert(stream.id());
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return devices_.at(device).stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    for_each(devices_.at(device).stats, [](auto& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    for_each(devices_.at(device).stats, [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    const auto& of = devices_.at(device);
    return {of.limit - of.reserved, of.limit};
  }

  void set_limit(c10::DeviceIndex device, size_t bytes) {
    std::lock_guard lock(mutex_);
    devices_.at(device).limit = bytes;
  }

  Arena* arena(c10::DeviceIndex device) {
    return devices_[device].arena;
  }

 private:
  struct OfDevice {
    Arena* arena = nullptr; // mapped at the first use, never unmapped: frees come until the process ends
    size_t limit = kArena / 2;
    size_t reserved = 0;
    std::map<c10::StreamId, std::multimap<size_t, Block*>> cache; // of each stream, by size
    std::vector<Block*> freed; // other streams may use them still
    c10::CachingDeviceAllocator::DeviceStats stats;
  };

  template <typename F>
  static void for_each(c10::CachingDeviceAllocator::DeviceStats& stats, F act) {
    for (auto* row : {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      act((*row)[kAll]);
    }
  }

  static void count(c10::CachingAllocator::StatArray& row, int64_t change) {
    auto& stat = row[kAll];
    change >= 0 ? stat.increase(change) : stat.decrease(-change);
  }

  Block* take(size_t bytes, c10::DeviceIndex device) {
    for (const bool last : {false, true}) {
      if (auto* block = try_take(bytes, device)) {
        return block;
      }
      if (!last) {
        flush(device);
      }
    }
    std::lock_guard lock(mutex_);
    auto& of = devices_[device];
    ++of.stats.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim:", int(device), " is out of memory: ", bytes, " bytes were asked for, ",
        of.limit - of.reserved, " of ", of.limit, " are free");
  }

  Block* try_take(size_t bytes, c10::DeviceIndex device) {
    const auto stream = current_stream(device);
    std::lock_guard lock(mutex_);
    auto& of = devices_[device];
    reap(of);
    Block* block = nullptr;
    auto& cache = of.cache[stream.id()];
    if (auto found = cache.lower_bound(bytes); found != cache.end() && found->first <= 2 * bytes) {
      block = found->second;
      cache.erase(found);
    } else {
      if (of.reserved + bytes > of.limit) {
        return nullptr;
      }
      if (of.arena == nullptr) {
        of.arena = new Arena();
      }
      void* address = of.arena->take(bytes);
      if (address == nullptr) {
        return nullptr;
      }
      block = new Block{address, bytes, 0, stream, {}, {}};
      of.reserved += bytes;
      count(of.stats.reserved_bytes, bytes);
    }
    poison(*block);
    block->asked = bytes;
    count(of.stats.allocated_bytes, bytes);
    count(of.stats.active_bytes, bytes);
    count(of.stats.allocation, 1);
    return block;
  }

  // The next owner of a block is assumed to write to it as soon as its stream comes to it. Not earlier: a program may free
  // what another stream still reads if nothing takes the block before that stream was waited for, as with gradients.
  void poison(const Block& block) {
    enqueue(block.stream, "poison", [to = opened(block.address, block.stream.device_index()), size = block.size] {
      std::memset(to, kPoison, size);
    });
  }

  // Move to their streams' caches what no other stream uses any more.
  void reap(OfDevice& of) {
    std::vector<Block*> used;
    for (auto* block : of.freed) {
      auto& points = block->points;
      while (!points.empty() && points.back()->passed()) {
        points.pop_back();
      }
      if (!points.empty()) {
        used.push_back(block);
        continue;
      }
      count(of.stats.active_bytes, -static_cast<int64_t>(block->asked));
      block->users.clear();
      auto& cache = of.cache[block->stream.id()];
      cache.emplace_hint(cache.lower_bound(block->size), block->size, block); // the last one freed is the next one taken
    }
    of.freed.swap(used);
  }

  // Give back what is cached. That waits for the device, as cudaFree does.
  void flush(c10::DeviceIndex device) {
    synchronize_device(device, "allocator", "");
    {
      std::lock_guard lock(mutex_);
      reap(devices_[device]);
    }
    std::lock_guard lock(mutex_);
    auto& of = devices_[device];
    for (auto& [id, cache] : of.cache) {
      for (auto it = cache.begin(); it != cache.end();) {
        auto* block = it->second;
        if (!is_idle(block->stream)) { // another thread has freed it meanwhile
          ++it;
          continue;
        }
        of.arena->give_back(block->address, block->size);
        of.reserved -= block->size;
        count(of.stats.reserved_bytes, -static_cast<int64_t>(block->size));
        delete block;
        it = cache.erase(it);
      }
    }
  }

  std::mutex mutex_;
  std::array<OfDevice, kDevices> devices_;
};

Allocator& the_allocator() {
  static auto& made = *new Allocator();
  return made;
}

void free_block(void* context) {
  if (context != nullptr && is_usable()) {
    the_allocator().release(static_cast<Block*>(context));
  }
}

// Pinned memory. Freed blocks are poisoned and had again when the streams that use them have passed where they stood.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    const auto size = (bytes + 4095) / 4096 * 4096;
    std::lock_guard lock(mutex_);
    reap();
    void* address = nullptr;
    if (auto found = cache_.find(size); found != cache_.end()) {
      address = found->second;
      cache_.erase(found);
    } else {
      address = std::aligned_alloc(4096, size);
      TORCH_CHECK(address != nullptr, "sim: no memory to pin");
      std::memset(address, kPoison, size);
    }
    blocks_[static_cast<char*>(address)] = {size, {}};
    return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  bool holds(const void* address) {
    std::lock_guard lock(mutex_);
    return find(address) != blocks_.end();
  }

  void use(const void* address, c10::Stream stream) {
    std::lock_guard lock(mutex_);
    if (auto found = find(address); found != blocks_.end()) {
      found->second.users.insert(stream);
    }
  }

  void release(void* address) {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(static_cast<char*>(address));
    std::vector<PointPtr> points;
    for (const auto& stream : found->second.users) {
      points.push_back(record(stream));
    }
    freed_.push_back({address, found->second.size, std::move(points)});
    blocks_.erase(found);
    reap();
  }

 private:
  static void free_pinned(void* address);

  struct ByStream {
    bool operator()(const c10::Stream& a, const c10::Stream& b) const {
      return std::pair(a.device_index(), a.id()) < std::pair(b.device_index(), b.id());
    }
  };
  struct Pinned {
    size_t size;
    std::set<c10::Stream, ByStream> users;
  };
  struct Freed {
    void* address;
    size_t size;
    std::vector<PointPtr> points;
  };

  std::map<char*, Pinned>::iterator find(const void* address) {
    auto next = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (next == blocks_.begin()) {
      return blocks_.end();
    }
    --next;
    return address < next->first + next->second.size ? next : blocks_.end();
  }

  void reap() {
    std::vector<Freed> used;
    for (auto& block : freed_) {
      while (!block.points.empty() && block.points.back()->passed()) {
        block.points.pop_back();
      }
      if (block.points.empty()) {
        std::memset(block.address, kPoison, block.size);
        cache_.emplace(block.size, block.address);
      } else {
        used.push_back(std::move(block));
      }
    }
    freed_.swap(used);
  }

  std::mutex mutex_;
  std::map<char*, Pinned> blocks_;
  std::vector<Freed> freed_;
  std::multimap<size_t, void*> cache_;
};

PinnedAllocator& the_pinned_allocator() {
  static auto& made = *new PinnedAllocator();
  return made;
}

void PinnedAllocator::free_pinned(void* address) {
  if (address != nullptr && is_usable()) {
    the_pinned_allocator().release(address);
  }
}

} // namespace

void* opened(const void* address, c10::DeviceIndex device) {
  return the_allocator().arena(device)->opened(address);
}

c10::DeviceAllocator* allocator() {
  return &the_allocator();
}

c10::Allocator* pinned_allocator() {
  return &the_pinned_allocator();
}

bool is_pinned(const void* address) {
  return the_pinned_allocator().holds(address);
}

void record_pinned_use(const void* address, c10::Stream stream) {
  the_pinned_allocator().use(address, stream);
}

c10::DeviceIndex device_of(const void* address) {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    if (const auto* arena = the_allocator().arena(device); arena != nullptr && arena->holds(address)) {
      return device;
    }
  }
  TORCH_CHECK(false, "sim: this address is not of a device");
}

void set_limit(c10::DeviceIndex device, size_t bytes) {
  the_allocator().set_limit(device, bytes);
}

} // namespace sim

#include "grid.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "fiber.h"

namespace seq1f1b::emulation {

Index thread_index, block_index;

namespace {

constexpr int success = 0, invalid_value = 1, launch_failure = 719;  // as in cudaError_t
constexpr int copy_bytes = 16;
constexpr int64_t guard_bytes = 4096;  // before and behind shared memory

class Random {
 public:
  void seed(uint64_t value) { state_ = value; }

  // Uniform below `bound`: splitmix64, whose slight bias does not matter here.
  int below(int bound) {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return static_cast<int>((z ^ (z >> 31)) % static_cast<uint64_t>(bound));
  }

  template <class T>
  void shuffle(std::vector<T>& items) {
    for (int i = static_cast<int>(items.size()); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

 private:
  uint64_t state_ = 0;
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
  int64_t group;
};

// Threads that wait for each other.
struct Meeting {
  int arrived = 0;
  Place place{};  // of those who arrived

  // True for the last of `expected`.
  bool arrive(int expected, Place where, const char* who) {
    if (arrived > 0 && (place.line != where.line || std::strcmp(place.file, where.file) != 0))
      fail(std::string("different places at once: threads of one ") + who + " wait at " + name(place) + " and at " +
           name(where));
    place = where;
    if (++arrived < expected) return false;
    arrived = 0;
    return true;
  }

  static std::string name(Place place) {
    const char* slash = std::strrchr(place.file, '/');
    return std::string(slash ? slash + 1 : place.file) + ":" + std::to_string(place.line);
  }
};

struct Thread {
  Fiber fiber;
  bool ended = true;
  Place waits_at{};
  std::vector<Copy> copies;
  int64_t open_group = 0;
};

struct Warp {
  Meeting meeting;
  void* brought[warp_size];
  std::vector<int> ready;  // threads
};

// The one block that runs. Its threads, with their stacks, serve all blocks.
struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  int size = 0, alive = 0, current = 0;
  Meeting meeting;
  bool any = false, any_of_last = false;
  std::vector<unsigned char> memory;
  int shared_bytes = 0;
  const std::function<void()>* kernel = nullptr;
  bool failed = false;
};

Block block;
Random random_order;
std::string error;
std::mutex one_launch;

unsigned char* shared_begin() {
  const auto address = reinterpret_cast<uintptr_t>(block.memory.data()) + guard_bytes;
  return reinterpret_cast<unsigned char*>((address + 127) / 128 * 128);
}

Thread& current() { return block.threads[block.current]; }

void make_ready(int thread) { block.warps[thread / warp_size].ready.push_back(thread); }

void wait(Place place) {
  current().waits_at = place;
  current().fiber.pause();
}

void run_thread() {
  (*block.kernel)();
  current().ended = true;
  --block.alive;
  current().fiber.pause();
}

std::string describe_deadlock() {
  std::map<std::string, int> waiting;
  for (int i = 0; i < block.size; ++i)
    if (!block.threads[i].ended) ++waiting[Meeting::name(block.threads[i].waits_at)];
  std::string text = "deadlock: of " + std::to_string(block.size) + " threads";
  for (const auto& [place, count] : waiting) text += " " + std::to_string(count) + " wait at " + place + ",";
  return text + " " + std::to_string(block.size - block.alive) + " have ended";
}

void prepare_block(int threads, int shared_bytes) {
  while (static_cast<int>(block.threads.size()) < threads) block.threads.emplace_back();
  block.size = block.alive = threads;
  block.shared_bytes = shared_bytes;
  block.memory.assign(shared_bytes + 2 * guard_bytes + 128, poison);
  block.meeting = {};
  block.any = false;
  block.warps.assign(threads / warp_size, {});
  for (int i = 0; i < threads; ++i) {
    Thread& thread = block.threads[i];
    thread.ended = false;
    thread.copies.clear();
    thread.open_group = 0;
    thread.fiber.prepare(run_thread);
    make_ready(i);
  }
}

// Runs the lanes of a warp that can go on, each until it waits, in a random order.
void run_warp(Warp& warp) {
  std::vector<int> lanes;
  lanes.swap(warp.ready);
  random_order.shuffle(lanes);
  for (const int thread : lanes) {
    block.current = thread;
    thread_index.x = thread;
    current().fiber.resume();
    if (block.failed) return;
  }
}

void check_guards() {
  const auto is_poison = [](unsigned char byte) { return byte == poison; };
  const unsigned char *begin = shared_begin(), *end = begin + block.shared_bytes;
  if (!std::all_of(static_cast<const unsigned char*>(block.memory.data()), begin, is_poison) ||
      !std::all_of(end, static_cast<const unsigned char*>(block.memory.data() + block.memory.size()), is_poison)) {
    error = "a write outside the block's " + std::to_string(block.shared_bytes) + " bytes of shared memory";
    block.failed = true;
  }
}

void run_block() {
  std::vector<int> able;
  while (block.alive > 0 && !block.failed) {
    able.clear();
    for (int i = 0; i < static_cast<int>(block.warps.size()); ++i)
      if (!block.warps[i].ready.empty()) able.push_back(i);
    if (able.empty()) {
      error = describe_deadlock();
      block.failed = true;
      return;
    }
    // Now and then a warp is left behind in the middle of its work.
    Warp& warp = block.warps[able[random_order.below(static_cast<int>(able.size()))]];
    do run_warp(warp);
    while (!block.failed && !warp.ready.empty() && random_order.below(16) > 0);
  }
  if (!block.failed) check_guards();
}

}  // namespace

void seed(uint64_t value) { random_order.seed(value); }

const std::string& last_error() { return error; }

int run_grid(int64_t blocks, int threads, int shared_bytes, const std::function<void()>& kernel) {
  if (threads < 1 || threads > 1024 || threads % warp_size != 0 || shared_bytes > largest_shared_bytes) {
    error = "a launch of " + std::to_string(threads) + " threads with " + std::to_string(shared_bytes) +
            " bytes of shared memory";
    return invalid_value;
  }
  const std::lock_guard<std::mutex> lock(one_launch);
  block.kernel = &kernel;
  block.failed = false;
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  random_order.shuffle(order);
  for (const unsigned index : order) {
    prepare_block(threads, shared_bytes);
    block_index.x = index;
    run_block();
    if (block.failed) return launch_failure;
  }
  return success;
}

void fail(const std::string& message) {
  error = message;
  block.failed = true;
  for (;;) current().fiber.pause();
}

char* shared_memory() { return reinterpret_cast<char*>(shared_begin()); }

void check_shared(const void* address, int64_t bytes, const char* instruction) {
  const int64_t offset = static_cast<const unsigned char*>(address) - shared_begin();
  if (offset < 0 || offset + bytes > block.shared_bytes || offset % 16 != 0)
    fail(std::string(instruction) + " at byte " + std::to_string(offset) + " of the block's " +
         std::to_string(block.shared_bytes) + " bytes of shared memory");
}

void meet_warp(void* brought, void (*act)(void* const* brought), Place place) {
  const int self = block.current, first = self / warp_size * warp_size;
  Warp& warp = block.warps[self / warp_size];
  warp.brought[self - first] = brought;
  if (!warp.meeting.arrive(warp_size, place, "warp")) return wait(place);
  if (act) act(warp.brought);
  for (int thread = first; thread < first + warp_size; ++thread)
    if (thread != self) make_ready(thread);
}

bool meet_block(bool predicate, Place place) {
  block.any |= predicate;
  if (!block.meeting.arrive(block.size, place, "block")) {
    wait(place);
  } else {
    block.any_of_last = block.any;
    block.any = false;
    for (int thread = 0; thread < block.size; ++thread)
      if (thread != block.current) make_ready(thread);
  }
  return block.any_of_last;
}

void start_copy(void* shared, const void* global, int bytes) {
  check_shared(shared, copy_bytes, "cp.async");
  if (bytes < 0 || bytes > copy_bytes || reinterpret_cast<uintptr_t>(global) % copy_bytes != 0)
    fail("cp.async of " + std::to_string(bytes) + " bytes from an address that is " +
         std::to_string(reinterpret_cast<uintptr_t>(global) % copy_bytes) + " bytes off a multiple of 16");
  std::memset(shared, poison, copy_bytes);
  current().copies.push_back({shared, global, bytes, current().open_group});
}

void close_copies() { ++current().open_group; }

void await_copies(int pending_groups) {
  std::vector<Copy>& copies = current().copies;
  const int64_t end = current().open_group - pending_groups;
  const auto done = std::stable_partition(copies.begin(), copies.end(), [&](const Copy& c) { return c.group >= end; });
  for (auto copy = done; copy != copies.end(); ++copy) {
    std::memset(copy->to, 0, copy_bytes);
    std::memcpy(copy->to, copy->from, copy->bytes);
  }
  copies.erase(done, copies.end());
}

}  // namespace seq1f1b::emulation

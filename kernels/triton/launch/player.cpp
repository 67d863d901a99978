// Ops as libtorch's dispatcher calls them, played from records (record.py): what the first calls of a kind allocated and launched is done
// again for later ones, without Python. A call that has no record goes on to the Python op of the same name with `_general`; if its kind came
// before, that is asked for a record. No header of CUDA is needed: the driver's functions arrive in the table, behind libtorch's. Behind
// kernels/libtorch.h in one text.
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

using Key = std::vector<uint64_t>;
using Words = const int64_t*;

// In the order of FUNCTIONS in player.py.
struct Functions {
  int32_t (*device_type)(Handle, int32_t*);
  int32_t (*device)(Handle, int32_t*);
  int32_t (*current_device)(int32_t*);
  int32_t (*offset)(Handle, int64_t*);
  int32_t (*view)(Handle, int64_t, const int64_t*, const int64_t*, int64_t, Handle*);
  int32_t (*another)(Handle, Handle*);  // handle of the same tensor
  int32_t (*new_list)(size_t, Handle*);
  int32_t (*push)(Handle, Value);
  int32_t (*length)(Handle, size_t*);
  int32_t (*characters)(Handle, const char**);
  int32_t (*release_string)(Handle);
  int32_t (*stream)(int32_t, void**);
  int32_t (*launch)(const void*, void*, void**, void**);  // cuLaunchKernelEx
  // cuTensorMapEncodeTiled
  int32_t (*encode)(void*, int32_t, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int32_t, int32_t, int32_t, int32_t);
  int32_t (*fill)(uint64_t, uint8_t, size_t, void*);  // cuMemsetD8Async
  int32_t (*copy)(uint64_t, uint64_t, size_t, void*); // cuMemcpyDtoDAsync
  int32_t (*note)(void*, void*);                      // cuEventRecord
  int32_t (*wait)(void*, void*, uint32_t);            // cuStreamWaitEvent
  int32_t (*tf32)();                                  // whether products of float32 may be rounded, which is part of their kind
};
Functions more_;
int32_t device_type_ = 1;  // of the tensors: CUDA, or in tests the CPU

// CUlaunchConfig.
struct Config {
  uint32_t grid[3], block[3], shared;
  void* stream;
  void* attributes;
  uint32_t num_attributes;
};

// A tensor map: `Tiled` in descriptors.py.
struct Tiled {
  uint64_t shape[5], strides[5];
  uint32_t block[5], steps[5], kind, rank, swizzle;
};
constexpr int32_t NO_INTERLEAVE = 0, BY_128_BYTES = 2, ZEROS = 0;

// The map of an array, made again where that begins elsewhere.
struct Map {
  size_t slot;
  Tiled shown;
  uint64_t last = 0;
  alignas(64) char made[128] = {};
};

// Of a kernel: memory that stays as it is, the address in a slot, or a map.
enum class From : int64_t { memory, slot, map };
struct Param {
  From from;
  int64_t value;
};

struct Launch {
  Config config;
  void* function;
  std::vector<Param> params;
  std::deque<Map> maps;  // which do not move
};

// Numbers are read in the order in which Python's `Recorder.finish` writes them. Each tensor and address of a call has a slot; the first ones
// are those of the arguments.
enum class Do : int64_t { make, share, at, fixed, view, zero, launch, call, drop, turn, copy, end };

// What is done with a second stream: it waits for the first one, is launched on, is left again, is waited for.
enum class Turn : int64_t { fork, aside, back, meet };

struct Record {
  size_t slots;
  std::vector<int64_t*> guards;  // numbers elsewhere that are zero as long as a call may be played
  std::vector<std::pair<size_t, uint64_t>> fixed;  // slots of arguments, and where these have to begin
  std::vector<int64_t> steps;
  std::vector<std::string> names;  // namespace::op and overload of each operation, by turns
  mutable std::mutex lock;         // of maps
  mutable std::vector<Launch> launches;

  bool fits(const std::vector<uint64_t>& at) const {
    for (const volatile int64_t* guard : guards)
      if (*guard) return false;
    for (auto [slot, address] : fixed)
      if (at[slot] != address) return false;
    return true;
  }
};

// Of a guard: a call that was played has failed after others may have seen it begin.
constexpr int64_t FAILED = -1;

// All records of one kind of call: they differ in where arguments begin whose addresses are in tables.
struct Kind {
  bool hopeless = false;
  std::vector<std::shared_ptr<const Record>> records;
};
constexpr size_t MOST_KINDS = 1 << 14, MOST_RECORDS = 1 << 8;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t h = 1469598103934665603u;
    for (uint64_t word : key) h = (h ^ word) * 1099511628211u ^ (h >> 29);
    return h;
  }
};
std::unordered_map<Key, Kind, Hash> kinds_;
std::mutex lock_;  // of the kinds
thread_local std::unique_ptr<Key> asked_;  // the kind that Python is asked to record, until it takes it

struct Op {
  std::string general, arguments;
  bool enabled = true;
};
std::deque<Op> ops_;

// Arguments are described by their schema: T tensor, w one word, d dtype, b bool, s text, and in front of these [ for a list, ? for an
// optional one.
const char* behind(const char* kind) {
  while (*kind == '[' || *kind == '?') ++kind;
  return kind + 1;
}

Value part(Value list, size_t i) {
  Value v;
  check(torch_.list_item(handle(list), i, &v));
  return v;
}

// What libtorch put on the stack is the kernel's: nobody else releases it. Deleting a list leaves its elements alive.
void release(const char* kind, Value v) {
  if (*kind == 'T') torch_.release(handle(v));
  if (*kind == 's') more_.release_string(handle(v));
  if (*kind == '?' && v) {
    release(kind + 1, *reinterpret_cast<Value*>(v));
    delete reinterpret_cast<Value*>(v);
  }
  if (*kind != '[') return;
  size_t count = 0;
  torch_.list_size(handle(v), &count);
  for (size_t i = 0; i < count; ++i) release(kind + 1, part(v, i));
  torch_.list_release(handle(v));
}

// What a record depends on: of each tensor its dtype, device, sizes, strides and alignment, and all other values.
struct Call {
  Key key;
  std::vector<Handle> tensors;
  std::vector<uint64_t> at;
  int32_t device = -1;
  bool here = true, wide = false;  // tensors are of one device, and some of float32

  void tensor(Handle t) {
    int64_t dim, *sizes, *strides;
    int32_t dtype, type, index;
    void* data;
    check(torch_.dim(t, &dim));
    check(torch_.sizes(t, &sizes));
    check(torch_.strides(t, &strides));
    check(torch_.dtype(t, &dtype));
    check(torch_.data(t, &data));
    check(more_.device_type(t, &type));
    check(more_.device(t, &index));
    if (tensors.empty()) device = index;
    here = here && type == device_type_ && index == device;
    wide = wide || dtype == FLOAT32;
    tensors.push_back(t);
    at.push_back(reinterpret_cast<uint64_t>(data));
    key.push_back((at.back() & 15) << 32 | uint64_t(uint32_t(dtype)) << 8 | uint64_t(dim));
    key.insert(key.end(), sizes, sizes + dim);
    key.insert(key.end(), strides, strides + dim);
  }

  void text(Handle s) {
    size_t length;
    const char* characters;
    check(more_.length(s, &length));
    check(more_.characters(s, &characters));
    key.push_back(length);
    for (size_t i = 0; i < length; i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, characters + i, std::min<size_t>(8, length - i));
      key.push_back(word);
    }
  }

  void describe(const char* kind, Value v) {
    switch (*kind) {
      case 'T': return tensor(handle(v));
      case 's': return text(handle(v));
      case 'w': return key.push_back(v);
      case 'd': return key.push_back(uint32_t(v));
      case 'b': return key.push_back(v & 1);
      case '?':
        key.push_back(v != 0);
        if (v) describe(kind + 1, *reinterpret_cast<Value*>(v));
        return;
    }
    size_t count;
    check(torch_.list_size(handle(v), &count));
    key.push_back(count);
    for (size_t i = 0; i < count; ++i) describe(kind + 1, part(v, i));
  }

  static constexpr int32_t FLOAT32 = 6;
};

// Tensors that a call has made, by their slot.
struct Made {
  std::vector<Handle> tensors;
  explicit Made(size_t slots) : tensors(slots) {}
  ~Made() {
    for (size_t i = 0; i < tensors.size(); ++i) drop(i);
  }
  void drop(size_t slot) {
    if (Handle t = std::exchange(tensors[slot], nullptr)) torch_.release(t);
  }
};

class Player {
 public:
  Player(const Record& record, Call& call) : record_(record), given_(call.tensors), at_(std::move(call.at)), made_(record.slots), device_(call.device) {
    at_.resize(record.slots);
    check(more_.stream(device_, &stream_));
  }

  // False if the driver declined before anything was launched.
  bool play(Value* results) {
    Words step = record_.steps.data();
    for (;;)
      switch (Do(*step++)) {
        case Do::make: make(step); break;
        case Do::share: share(step); break;
        case Do::at: {
          const size_t slot = next(step), base = next(step);
          at_[slot] = at_[base] + next(step);
          break;
        }
        case Do::fixed: {
          const size_t slot = next(step);
          at_[slot] = next(step);
          break;
        }
        case Do::view: view(step); break;
        case Do::zero: {
          const size_t slot = next(step);
          const int32_t error = more_.fill(at_[slot], 0, next(step), stream_);
          if (error && !launched_) return false;
          launched_ = true;
          stop(error);
          break;
        }
        case Do::launch:
          if (const int32_t error = launch(record_.launches[next(step)])) {
            if (!launched_) return false;
            stop(error);
          }
          launched_ = true;
          break;
        case Do::call: call(step); break;
        case Do::drop: made_.drop(next(step)); break;
        case Do::turn: turn(step); break;
        case Do::copy: {
          const size_t to = next(step), from = next(step);
          launched_ = true;
          stop(more_.copy(at_[to], at_[from], next(step), stream_));
          break;
        }
        case Do::end: finish(step, results); return true;
      }
  }

 private:
  static size_t next(Words& step) { return size_t(*step++); }

  static void stop(int32_t error) {
    if (error) throw std::runtime_error("moefuse: CUDA error " + std::to_string(error) + " at a launch");
  }

  Handle tensor(size_t slot) const { return slot < given_.size() ? given_[slot] : made_.tensors[slot]; }

  void hold(size_t slot, Handle t) {
    void* data;
    made_.tensors[slot] = t;
    check(torch_.data(t, &data));
    at_[slot] = reinterpret_cast<uint64_t>(data);
  }

  void make(Words& step) {
    const size_t slot = next(step);
    const int32_t dtype = int32_t(next(step));
    const int64_t dim = *step++;
    Fresh fresh(dim, step, step + dim, dtype, device_type_, device_);
    step += 2 * dim;
    at_[slot] = reinterpret_cast<uint64_t>(fresh.data);
    made_.tensors[slot] = handle(fresh.give());
  }

  // Small arrays that only launches see, in one allocation.
  void share(Words& step) {
    const size_t slot = next(step);
    const int64_t bytes = *step++, one = 1;
    Fresh fresh(1, &bytes, &one, BYTES, device_type_, device_);
    for (size_t count = next(step); count; --count) {
      const size_t array = next(step);
      at_[array] = reinterpret_cast<uint64_t>(fresh.data) + next(step);
    }
    made_.tensors[slot] = handle(fresh.give());
  }

  void view(Words& step) {
    const size_t slot = next(step), base = next(step);
    int64_t begin;
    check(more_.offset(tensor(base), &begin));
    begin += *step++;
    const int64_t dim = *step++;
    Handle t;
    check(more_.view(tensor(base), dim, step, step + dim, begin, &t));
    step += 2 * dim;
    hold(slot, t);
  }

  void turn(Words& step) {
    const Turn what = Turn(*step++);
    void* const other = reinterpret_cast<void*>(*step++);
    void* const event = reinterpret_cast<void*>(*step++);
    switch (what) {
      case Turn::fork:
        stop(more_.note(event, stream_));
        return stop(more_.wait(other, event, 0));
      case Turn::aside:
        first_ = std::exchange(stream_, other);
        return;
      case Turn::back:
        stop(more_.note(event, other));
        stream_ = first_;
        return;
      case Turn::meet: stop(more_.wait(stream_, event, 0));
    }
  }

  int32_t launch(Launch& it) const {
    std::unique_lock<std::mutex> guard(record_.lock, std::defer_lock);
    if (!it.maps.empty()) guard.lock();
    for (Map& map : it.maps)
      if (const int32_t error = point(map)) return error;
    Config config = it.config;
    config.stream = stream_;
    std::vector<void*> params(it.params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      const auto [from, value] = it.params[i];
      params[i] = from == From::memory ? reinterpret_cast<void*>(value)
                  : from == From::map  ? static_cast<void*>(it.maps[size_t(value)].made)
                                       : const_cast<uint64_t*>(&at_[size_t(value)]);
    }
    return more_.launch(&config, it.function, params.data(), nullptr);
  }

  int32_t point(Map& map) const {
    const uint64_t begin = at_[map.slot];
    if (map.last == begin) return 0;
    const Tiled& s = map.shown;
    const int32_t error = more_.encode(map.made, int32_t(s.kind), s.rank, reinterpret_cast<void*>(begin), s.shape, s.strides, s.block, s.steps,
                                       NO_INTERLEAVE, int32_t(s.swizzle), BY_128_BYTES, ZEROS);
    map.last = error ? 0 : begin;
    return error;
  }

  // An argument of an operation, which takes it over.
  enum class Argument : int64_t { word, tensor, some, list };
  Value argument(Words& step) const {
    switch (Argument(*step++)) {
      case Argument::word: return Value(*step++);
      case Argument::some: return reinterpret_cast<Value>(new Value(argument(step)));
      case Argument::tensor: {
        Handle t;
        check(more_.another(tensor(next(step)), &t));
        return reinterpret_cast<Value>(t);
      }
      case Argument::list: break;
    }
    const size_t count = next(step);
    Handle list;
    check(more_.new_list(count, &list));
    for (size_t i = 0; i < count; ++i) check(more_.push(list, argument(step)));
    return reinterpret_cast<Value>(list);
  }

  void call(Words& step) {
    const size_t name = next(step), count = next(step);
    std::vector<Value> stack;
    for (size_t i = 0; i < count; ++i) stack.push_back(argument(step));
    const size_t results = next(step);
    stack.resize(std::max(count, results));
    check(torch_.call(record_.names[2 * name].c_str(), record_.names[2 * name + 1].c_str(), stack.data(), TORCH_2_10));
    launched_ = true;
    for (size_t i = 0; i < results; ++i) {
      const int64_t slot = *step++;
      if (slot < 0) torch_.release(handle(stack[i]));  // one that has a slot
      else hold(size_t(slot), handle(stack[i]));
    }
  }

  Value result(size_t slot) {
    if (slot >= given_.size() && made_.tensors[slot]) return reinterpret_cast<Value>(std::exchange(made_.tensors[slot], nullptr));
    Handle t;
    check(more_.another(tensor(slot), &t));
    return reinterpret_cast<Value>(t);
  }

  // Tensors, or one list of them.
  void finish(Words& step, Value* results) {
    const bool list = next(step);
    const size_t count = next(step);
    if (!list) {
      for (size_t i = 0; i < count; ++i) results[i] = result(next(step));
      return;
    }
    Handle all;
    check(more_.new_list(count, &all));
    for (size_t i = 0; i < count; ++i) check(more_.push(all, result(next(step))));
    *results = reinterpret_cast<Value>(all);
  }

  static constexpr int32_t BYTES = 0;  // dtype
  const Record& record_;
  const std::vector<Handle>& given_;
  std::vector<uint64_t> at_;
  Made made_;
  void *stream_ = nullptr, *first_ = nullptr;
  int32_t device_;
  bool launched_ = false;
};

// The record of a call; none, and then the kind if a record of it is wanted: it came before.
std::shared_ptr<const Record> find(const Call& call, bool& wanted) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = kinds_.find(call.key);
  if (found == kinds_.end()) {
    if (kinds_.size() >= MOST_KINDS) kinds_.clear();
    kinds_[call.key];
    return nullptr;
  }
  for (const auto& record : found->second.records)
    if (record->fits(call.at)) return record;
  wanted = !found->second.hopeless && found->second.records.size() < MOST_RECORDS;
  return nullptr;
}

bool played(const Record& record, Call& call, Value* stack) {
  try {
    return Player(record, call).play(stack);
  } catch (...) {
    for (int64_t* guard : record.guards) *guard = FAILED;
    throw;
  }
}

// Whether the call was played. If not, and a record is wanted, `asked_` is set.
bool played(size_t index, Value* stack) {
  Call call;
  call.key.reserve(128);
  call.key.push_back(index);
  Value* v = stack;
  for (const char* kind = ops_[index].arguments.c_str(); *kind; kind = behind(kind)) call.describe(kind, *v++);
  if (!call.here || call.tensors.empty()) return false;
  int32_t current = call.device;
  if (device_type_) check(more_.current_device(&current));
  if (current != call.device) return false;
  call.key.push_back(uint64_t(uint32_t(call.device)) << 1 | uint64_t(call.wide && more_.tf32()));
  bool wanted = false;
  if (auto record = find(call, wanted)) return played(*record, call, stack);
  if (wanted) asked_ = std::make_unique<Key>(std::move(call.key));
  return false;
}

void run(size_t index, Value* stack) {
  const Op& op = ops_[index];
  const char* kinds = op.arguments.c_str();
  std::vector<Value> given;
  for (const char* kind = kinds; *kind; kind = behind(kind)) given.push_back(stack[given.size()]);
  auto let_go = [&] {
    const Value* v = given.data();
    for (const char* kind = kinds; *kind; kind = behind(kind)) release(kind, *v++);
  };
  bool done = false;
  try {
    done = op.enabled && played(index, stack);
  } catch (...) {
    let_go();
    throw;
  }
  if (done) return let_go();
  const int32_t error = torch_.call(op.general.c_str(), "", stack, TORCH_2_10);
  asked_.reset();
  check(error);
}

constexpr size_t MOST_OPS = 64;
template <size_t N> void kernel(Value* stack, uint64_t, uint64_t) { run(N, stack); }
template <size_t... N> Kernel* kernel_of(size_t index, std::index_sequence<N...>) {
  static constexpr Kernel* all[] = {kernel<N>...};
  return all[index];
}

}  // namespace

#define PUBLIC extern "C" __attribute__((visibility("default")))

PUBLIC void moefuse_start(void* const* functions, int32_t type) {
  read_table(functions, more_);
  device_type_ = type;
}

// From now on the dispatcher runs the op on tensors of `dispatch` here. The op's number, or libtorch's error code, negative.
PUBLIC int32_t moefuse_play(const char* name, const char* op, const char* dispatch, const char* arguments) {
  const size_t index = ops_.size();
  if (index >= MOST_OPS) return -1;
  ops_.push_back({std::string(name) + "::" + op + "_general", arguments});
  Handle library;
  int32_t error = torch_.library(name, dispatch, "moefuse/kernels/triton", 1, &library);
  error = error ? error : torch_.implement(library, op, kernel_of(index, std::make_index_sequence<MOST_OPS>()), TORCH_2_10);
  return error ? -std::abs(error) : int32_t(index);
}

PUBLIC void moefuse_enable(int32_t op, int32_t enabled) { ops_[size_t(op)].enabled = enabled; }

// The kind of the call that this thread is in, to be given back with its record; null if none is wanted.
PUBLIC void* moefuse_asked() { return asked_.release(); }

PUBLIC void moefuse_decline(void* kind) { delete static_cast<Key*>(kind); }

// A record of a kind: sizes of what follows (slots, guards, fixed, steps, names, launches), then the guards, the fixed ones, the steps, of
// each launch its configuration, function, params and maps. None (no numbers): there will be none.
PUBLIC void moefuse_record(void* kind, const int64_t* numbers, const char* const* names) {
  std::unique_ptr<Key> key(static_cast<Key*>(kind));
  auto record = std::make_shared<Record>();
  if (Words n = numbers) {
    record->slots = size_t(*n++);
    size_t guards = size_t(*n++), fixed = size_t(*n++), steps = size_t(*n++), operations = size_t(*n++), launches = size_t(*n++);
    for (; guards; --guards) record->guards.push_back(reinterpret_cast<int64_t*>(*n++));
    for (; fixed; --fixed, n += 2) record->fixed.push_back({size_t(n[0]), uint64_t(n[1])});
    record->steps.assign(n, n + steps);
    n += steps;
    record->names.assign(names, names + 2 * operations);
    for (; launches; --launches) {
      Launch it;
      it.config = *reinterpret_cast<const Config*>(*n++);
      it.function = reinterpret_cast<void*>(*n++);
      size_t params = size_t(*n++), maps = size_t(*n++);
      for (; params; --params, n += 2) it.params.push_back({From(n[0]), n[1]});
      for (; maps; --maps, n += 2) {
        Map& map = it.maps.emplace_back();
        map.slot = size_t(n[0]);
        map.shown = *reinterpret_cast<const Tiled*>(n[1]);
      }
      record->launches.push_back(std::move(it));
    }
  }
  std::lock_guard<std::mutex> guard(lock_);
  auto found = kinds_.find(*key);
  if (found == kinds_.end()) return;  // forgotten meanwhile
  if (numbers) found->second.records.push_back(std::move(record));
  else found->second.hopeless = true;
}

PUBLIC void moefuse_forget() {
  std::lock_guard<std::mutex> guard(lock_);
  kinds_.clear();
}

// How many kinds have a record.
PUBLIC int64_t moefuse_known() {
  std::lock_guard<std::mutex> guard(lock_);
  int64_t count = 0;
  for (const auto& [key, kind] : kinds_) count += !kind.records.empty();
  return count;
}

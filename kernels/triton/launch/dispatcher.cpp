// moefuse::experts_infer on CUDA as libtorch's dispatcher calls it, for plans that driver_launch.py has laid out: finds the plan by what it depends
// on, allocates the output and one workspace, writes the addresses of this call and launches. Everything else goes on to the Python op.
// No header of CUDA is needed: the driver's launch function arrives in the table, behind libtorch's. Behind kernels/libtorch.h in one text.
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

using Key = std::vector<uint64_t>;
constexpr size_t SINGLE = 3;  // x, ids, weights come before the lists

// In the order of FUNCTIONS in dispatcher.py.
struct Functions {
  int32_t (*device)(Handle, int32_t*);
  int32_t (*current_device)(int32_t*);
  int32_t (*stream)(int32_t, void**);
  int32_t (*launch)(const void*, void*, void**, void**);  // cuLaunchKernelEx
  // cuTensorMapEncodeTiled
  int32_t (*encode)(void*, int32_t, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int32_t, int32_t, int32_t, int32_t);
};
Functions more_;
std::string other;       // the op that takes what is not known here
int32_t device_type = 1;  // of the tensors: CUDA, or in tests the CPU

// CUlaunchConfig.
struct Config {
  uint32_t grid[3], block[3], shared;
  void* stream;
  void* attributes;
  uint32_t num_attributes;
};

// One kernel: its configuration, function and parameters lie in memory that driver_launch.py keeps.
struct Launch {
  Config* config;
  void* function;
  void** params;
};

// One tensor map: `Tiled` in descriptors.py. It is made again where its array begins elsewhere.
struct Map {
  const uint64_t* cell;
  void* at;
  uint64_t last, shape[5], strides[5];
  uint32_t block[5], steps[5], kind, rank, swizzle;
};
constexpr int32_t NO_INTERLEAVE = 0, BY_128_BYTES = 2, ZEROS = 0;

struct Plan {
  int64_t out[2], bytes;
  int32_t out_dtype, byte_dtype;
  std::vector<int64_t> inputs;    // position of each input among the tensors; -1 - k: the address constants[k]
  std::vector<int64_t> sections;  // offset of each section of the workspace
  std::vector<uint64_t> constants;
  uint64_t* cells;                        // addresses: out, inputs, sections
  std::vector<Launch> launches;
  std::vector<Map*> maps;
};

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t h = 1469598103934665603u;
    for (uint64_t word : key) h = (h ^ word) * 1099511628211u ^ (h >> 29);
    return h;
  }
};
std::unordered_map<Key, Plan, Hash> plans;
std::mutex lock;  // also keeps threads apart from writing the addresses to the launch

// What a plan depends on: options, list lengths, device, and of each tensor dtype, sizes, strides, and its alignment or, in a list of
// separate Parameters, its address: those are in a table on the device that belongs to the plan. False: not a call of this op.
bool describe(const Value* stack, Key& key, std::vector<uint64_t>& addresses) {
  size_t count = 0, lists = 0;
  check(torch_.list_size(handle(stack[0]), &count));
  check(torch_.list_size(handle(stack[1]), &lists));
  if (count < SINGLE) return false;
  key.reserve(12 + count * 8);
  addresses.reserve(count);
  key.insert(key.end(), {stack[2], stack[3], stack[4], uint64_t(uint32_t(stack[5]))});
  std::vector<bool> separate(SINGLE, false);
  for (size_t i = 0; i < lists; ++i) {
    Value n;
    check(torch_.list_item(handle(stack[1]), i, &n));
    key.push_back(n);
    if (n > count) return false;
    separate.insert(separate.end(), size_t(n), n > 1);
  }
  if (separate.size() != count) return false;
  int32_t device;
  for (size_t i = 0; i < count; ++i) {
    Handle t = item(stack[0], i);
    int64_t dim, *sizes, *strides;
    int32_t dtype;
    void* data;
    check(torch_.dim(t, &dim));
    check(torch_.sizes(t, &sizes));
    check(torch_.strides(t, &strides));
    check(torch_.dtype(t, &dtype));
    check(torch_.data(t, &data));
    addresses.push_back(reinterpret_cast<uint64_t>(data));
    key.push_back(uint64_t(uint32_t(dtype)) << 8 | uint64_t(dim));
    key.push_back(separate[i] ? addresses.back() : addresses.back() & 15);
    key.insert(key.end(), sizes, sizes + dim);
    key.insert(key.end(), strides, strides + dim);
  }
  check(more_.device(item(stack[0], 0), &device));
  key.push_back(uint64_t(int64_t(device)));
  return true;
}

// False if the driver declined.
bool point(Map& map) {
  if (map.last == *map.cell) return true;
  map.last = *map.cell;
  void* begin = reinterpret_cast<void*>(map.last);
  if (!more_.encode(map.at, int32_t(map.kind), map.rank, begin, map.shape, map.strides, map.block, map.steps, NO_INTERLEAVE, int32_t(map.swizzle), BY_128_BYTES, ZEROS))
    return true;
  map.last = 0;
  return false;
}

// Runs a plan; false if the driver declined a map or its first launch, then nothing ran.
bool run(Plan& plan, const std::vector<uint64_t>& addresses, int32_t device, Value* result) {
  const int64_t strides[] = {plan.out[1], 1}, one = 1;
  void* stream;
  check(more_.stream(device, &stream));
  Fresh out(2, plan.out, strides, plan.out_dtype, device_type, device);
  Fresh workspace(1, &plan.bytes, &one, plan.byte_dtype, device_type, device);
  const uint64_t space = reinterpret_cast<uint64_t>(workspace.data);
  uint64_t* cell = plan.cells;
  *cell++ = reinterpret_cast<uint64_t>(out.data);
  for (int64_t i : plan.inputs) *cell++ = i < 0 ? plan.constants[size_t(-1 - i)] : addresses[size_t(i)];
  for (int64_t offset : plan.sections) *cell++ = space + uint64_t(offset);
  for (Map* map : plan.maps)
    if (!point(*map)) return false;
  int32_t error = 0;
  size_t done = 0;
  for (; done < plan.launches.size() && !error; done += !error) {
    Launch& one_launch = plan.launches[done];
    one_launch.config->stream = stream;
    error = more_.launch(one_launch.config, one_launch.function, one_launch.params, nullptr);
  }
  if (error && done) throw std::runtime_error("moefuse::experts: CUDA error " + std::to_string(error) + " at a launch");
  if (error) return false;
  *result = out.give();
  return true;
}

bool known(Value* stack) {
  Key key;
  std::vector<uint64_t> addresses;
  if (!describe(stack, key, addresses)) return false;
  int32_t device = int32_t(key.back()), current = device;
  if (device_type) check(more_.current_device(&current));
  if (current != device) return false;
  std::lock_guard<std::mutex> guard(lock);
  auto found = plans.find(key);
  return found != plans.end() && run(found->second, addresses, device, stack);
}

void infer_kernel(Value* stack, uint64_t, uint64_t) { run_op(stack, other.c_str(), known); }

}  // namespace

#define PUBLIC extern "C" __attribute__((visibility("default")))

// From now on the dispatcher runs namespace::op on tensors of `dispatch` here. 0, or libtorch's error code.
PUBLIC int32_t moefuse_register(void* const* functions, const char* name, const char* dispatch, const char* op, const char* fallback, int32_t type) {
  read_table(functions, more_);
  other = std::string(name) + "::" + fallback;
  device_type = type;
  Handle library;
  if (int32_t error = torch_.library(name, dispatch, "moefuse/kernels/triton", 1, &library)) return error;
  return torch_.implement(library, op, infer_kernel, TORCH_2_10);
}

// The plan of a call with this key. `numbers`: out [2], bytes, out_dtype, dtype of bytes, inputs, sections, constants, launches, maps (five
// counts), then the inputs, the sections, the constants, of each launch the addresses of its configuration, function and parameters, and the maps.
PUBLIC void moefuse_remember(const uint64_t* key, int64_t words, const int64_t* numbers, uint64_t* cells) {
  Plan plan;
  const int64_t* n = numbers;
  plan.out[0] = *n++;
  plan.out[1] = *n++;
  plan.bytes = *n++;
  plan.out_dtype = int32_t(*n++);
  plan.byte_dtype = int32_t(*n++);
  int64_t inputs = *n++, sections = *n++, constants = *n++, launches = *n++, maps = *n++;
  plan.inputs.assign(n, n + inputs);
  n += inputs;
  plan.sections.assign(n, n + sections);
  n += sections;
  plan.constants.assign(n, n + constants);
  n += constants;
  for (int64_t i = 0; i < launches; ++i, n += 3)
    plan.launches.push_back({reinterpret_cast<Config*>(n[0]), reinterpret_cast<void*>(n[1]), reinterpret_cast<void**>(n[2])});
  for (int64_t i = 0; i < maps; ++i) plan.maps.push_back(reinterpret_cast<Map*>(*n++));
  plan.cells = cells;
  std::lock_guard<std::mutex> guard(lock);
  plans[Key(key, key + words)] = plan;
}

PUBLIC void moefuse_forget() {
  std::lock_guard<std::mutex> guard(lock);
  plans.clear();
}

PUBLIC int64_t moefuse_known() {
  std::lock_guard<std::mutex> guard(lock);
  return int64_t(plans.size());
}

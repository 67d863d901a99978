// moefuse::experts_infer as libtorch's dispatcher calls it. Calls that this kernel is not made for go on to moefuse::experts_infer_general.
namespace {

// Up to so many slots per expert this kernel is quicker than GEMMs of the BLAS library (measured, see benchmarks/ops_cpu.py).
// The choice depends on sizes alone, never on where the router sends the tokens.
constexpr int64_t ROWS_BY_DOTS = 16, ROWS_BY_SUMS = 4, MOST_SLOTS = 1024;

// The expert outputs of a call take at most this; a larger call goes in blocks of tokens, but not of so few that experts get
// less than that many rows on average.
constexpr int64_t BLOCK_BYTES = int64_t(64) << 20, BLOCK_ROWS = 128;

bool few(const Call& c) {
  int64_t slots = c.ids.rows * c.ids.columns;
  if (max_slots >= 0) return slots <= max_slots;
  return slots <= MOST_SLOTS && slots <= c.w_in.count * (c.w_in.contiguous_in && c.w_out.contiguous_in ? ROWS_BY_DOTS : ROWS_BY_SUMS);
}

// Threads that pay: one for every so many weight elements that are read; later rows of an expert cost a part of the first.
int threads_for(const Call& c, const Routing& r) {
  int64_t expert = c.w_in.out * c.w_in.in * (c.w_up.present ? 2 : 1) + c.w_out.out * c.w_out.in;
  int64_t work = expert * int64_t(3 * r.groups.size() + r.order.size()) / 4;
  return int(std::max<int64_t>(1, std::min<int64_t>(torch_threads(), work / 65536)));
}

template <class D> void run_many(const Call& call, const Routing& routing) {
  int64_t per_token = std::max<int64_t>(1, call.ids.columns * call.w_out.out * int64_t(sizeof(Acc<D>)));
  int64_t block = std::max<int64_t>({BLOCK_BYTES / per_token, BLOCK_ROWS * call.w_in.count / std::max<int64_t>(call.ids.columns, 1), 1});
  if (call.x.rows <= block) return Large<D>(call, routing, multiply, nullptr).run();
  for (int64_t t = 0; t < call.x.rows; t += block) {
    Call part = call;
    part.x.rows = part.ids.rows = part.weights.rows = std::min(block, call.x.rows - t);
    part.x.data += t * call.x.row_stride * int64_t(sizeof(D));
    part.ids.data += t * call.ids.row_stride * item_size(call.ids.dtype);
    part.weights.data += t * call.weights.row_stride * item_size(call.weights.dtype);
    part.out = static_cast<char*>(call.out) + t * call.w_out.out * item_size(call.out_dtype);
    Large<D>(part, Routing(part.ids, call.w_in.count), multiply, nullptr).run();
  }
}

template <class D> void run(const Call& c, const Routing& routing, bool many) {
  many ? run_many<D>(c, routing) : Body<D>(c, routing).run();
}

bool infer(Value* stack) {
  Call c;
  Lists lists;
  if (!read_forward(c, stack, lists)) return false;
  const bool many = !few(c);
  if (many && (max_slots >= 0 || !multiplies(c.x.dtype))) return false;
  Routing routing(c.ids, c.w_in.count);
  if (!lists.describe(c, &routing)) return false;
  c.threads = many ? torch_threads() : threads_for(c, routing);
  Fresh out = fresh({c.x.rows, c.w_out.out}, c.out_dtype);
  c.out = out.data;
  switch (c.x.dtype) {
    case FLOAT: run<float>(c, routing, many); break;
    case BFLOAT16: run<BF16>(c, routing, many); break;
    case HALF: run<F16>(c, routing, many); break;
    default: run<double>(c, routing, many);
  }
  stack[0] = out.give();
  return true;
}

void infer_kernel(Value* stack, uint64_t, uint64_t) { run_op(stack, "moefuse::experts_infer_general", infer); }

}  // namespace

// From now on the dispatcher runs the op on CPU tensors here. 0, or libtorch's error code.
extern "C" __attribute__((visibility("default"))) int32_t moefuse_register(void* const* functions) {
  return implement(functions, {{"experts_infer", infer_kernel}});
}

// The whole op for many slots: rows gathered by expert in chunks that stay in cache, GEMMs by torch, everything between them here.
// A 16-bit call multiplies in float32: its weights are widened a tile at a time, the way of moefuse/runtime/gemm.py.
namespace {

struct Operand {
  const void* data;
  int64_t row_stride, column_stride;
};

// out [m, n] with rows `ld` apart = a [m, k] @ b [k, n]
using Multiply = void (*)(int dtype, void* out, int64_t ld, int64_t m, int64_t k, int64_t n, Operand a, Operand b);

template <class A> constexpr int ACC_DTYPE = std::is_same<A, double>::value ? DOUBLE : FLOAT;

// Whole experts [first, end), whose sorted rows start at `begin`.
struct Chunk {
  size_t first, end;
  int64_t begin, rows;
};

constexpr int64_t CHUNK_ROWS = 256;

// Consecutive experts taken together while they have at most CHUNK_ROWS rows (a larger one stands alone).
inline std::vector<Chunk> chunks(const Routing& r) {
  std::vector<Chunk> out;
  for (size_t g = 0; g < r.groups.size(); ++g) {
    const auto& group = r.groups[g];
    if (out.empty() || group.end - out.back().begin > CHUNK_ROWS) out.push_back({g, g, group.begin, 0});
    out.back().end = g + 1;
    out.back().rows = group.end - out.back().begin;
  }
  return out;
}

// work(chunk, scratch, threads) for every chunk. Where there are enough of them each runs on one thread, because GEMMs of this size gain
// little from more; a chunk with more than a fair share of the rows runs before, on all threads.
template <class Work> void over_chunks(const Routing& r, int threads, const Work& work) {
  using Scratch = typename Work::Scratch;
  std::vector<Chunk> all = chunks(r), together, apart;
  bool enough = threads > 1 && int64_t(all.size()) >= 2 * threads;
  int64_t fair = std::max(CHUNK_ROWS, int64_t(r.order.size()) / (2 * threads)), most[2] = {};
  for (const Chunk& chunk : all) {
    bool alone = enough && chunk.rows <= fair;
    (alone ? apart : together).push_back(chunk);
    most[alone] = std::max(most[alone], chunk.rows);
  }
  if (!together.empty()) {
    Scratch scratch(work, most[0]);
    for (const Chunk& chunk : together) work(chunk, scratch, threads);
  }
  if (apart.empty()) return;
  std::exception_ptr failure;
#pragma omp parallel num_threads(threads)
  {
    std::unique_ptr<Scratch> scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < int64_t(apart.size()); ++i) {
      try {
        if (!scratch) scratch.reset(new Scratch(work, most[1]));
        work(apart[i], *scratch, 1);
      } catch (...) {
#pragma omp critical
        failure = std::current_exception();
      }
    }
  }
  if (failure) std::rethrow_exception(failure);
}

template <class F> void parallel(int threads, int64_t n, int64_t cost, F f) {
  constexpr int64_t ALONE = 1 << 14;
  if (threads <= 1 || n * cost < ALONE) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < n; ++i) f(i);
}

template <class D> void widen_row(const D* from, int64_t n, Acc<D>* to) {
  constexpr int W = WIDTH<Acc<D>>;
  int64_t i = 0;
  for (; i + W <= n; i += W) store<Acc<D>>(to + i, load(from + i));
  for (; i < n; ++i) to[i] = widen(from[i]);
}

template <class D> void narrow_row(const Acc<D>* from, int64_t n, D* to) {
  constexpr int W = WIDTH<Acc<D>>;
  int64_t i = 0;
  for (; i + W <= n; i += W) store_lanes(to + i, load(from + i));
  for (; i < n; ++i) to[i] = narrow<D>(from[i]);
}

// Rounds n values to D, where they stay in the accumulation dtype.
template <class D> void round_row(Acc<D>* row, int64_t n) {
  if (std::is_same<D, Acc<D>>::value) return;
  constexpr int W = WIDTH<Acc<D>>;
  int64_t i = 0;
  for (; i + W <= n; i += W) store<Acc<D>>(row + i, rounded_lanes(load(row + i), static_cast<D*>(nullptr)));
  for (; i < n; ++i) row[i] = rounded<D>(row[i]);
}

constexpr int64_t TILE = 1 << 17;

// out [count, columns] = rows [count, k] @ w, where w[i][j] is data[i * k_stride + j * j_stride] and one of the strides is 1.
template <class D>
void product(Multiply multiply, int threads, const Acc<D>* rows, int64_t ld_rows, int64_t count, int64_t k, const D* data, int64_t columns,
             int64_t k_stride, int64_t j_stride, Acc<D>* tile, Acc<D>* out, int64_t ld) {
  using A = Acc<D>;
  Operand left{rows, ld_rows, 1};
  if (std::is_same<D, A>::value) return multiply(ACC_DTYPE<A>, out, ld, count, k, columns, left, {data, k_stride, j_stride});
  int64_t step = std::max<int64_t>(16, TILE / std::max<int64_t>(k, 1));
  for (int64_t j = 0; j < columns; j += step) {
    int64_t n = std::min(step, columns - j);
    if (k_stride == 1) {
      parallel(threads, n, k, [&](int64_t i) { widen_row(data + (j + i) * j_stride, k, tile + i * k); });
      multiply(ACC_DTYPE<A>, out + j, ld, count, k, n, left, {tile, 1, k});
    } else {
      parallel(threads, k, n, [&](int64_t i) { widen_row(data + i * k_stride + j, n, tile + i * n); });
      multiply(ACC_DTYPE<A>, out + j, ld, count, k, n, left, {tile, n, 1});
    }
  }
}

// Row `row` of a matrix in the accumulation dtype.
template <class D> void read_row(const Matrix& m, int64_t row, Acc<D>* to) {
  const D* from = reinterpret_cast<const D*>(m.data) + row * m.row_stride;
  if (m.column_stride == 1) return widen_row(from, m.columns, to);
  for (int64_t i = 0; i < m.columns; ++i) to[i] = widen(from[i * m.column_stride]);
}

// The input row of a slot: the token, times the routing weight if that goes on the input.
template <class D> void gather(const Call& c, int64_t slot, Acc<D>* to) {
  int64_t top_k = c.weights.columns;
  read_row<D>(c.x, slot / top_k, to);
  if (!c.weight_on_input) return;
  Acc<D> scale = scalar<Acc<D>>(c.weights, slot / top_k, slot % top_k);
  for (int64_t i = 0; i < c.x.columns; ++i) to[i] = rounded<D>(to[i] * scale);
}

template <class D> class Large {
  using A = Acc<D>;
  static constexpr bool WIDENED = !std::is_same<D, A>::value;

 public:
  // What one thread works in.
  struct Scratch {
    Scratch(const Large& l, int64_t rows) : xs(new A[rows * l.in]), h(new A[rows * l.width]), a(new A[rows * l.inner]) {
      if (WIDENED) tile.reset(new A[std::max(TILE, 16 * std::max(l.in, l.inner))]);
    }
    std::unique_ptr<A[]> xs, h, a, tile;
  };

  // keep: where the rounded pre-activations [slots, width] go; may be null.
  Large(const Call& call, const Routing& routing, Multiply mm, D* keep)
      : c(call), r(routing), multiply(mm), kept(keep), in(call.x.columns),
        width(call.gating == SEPARATE ? 2 * call.w_in.out : call.w_in.out), inner(call.w_out.in), hidden(call.w_out.out),
        y(new A[routing.order.size() * call.w_out.out]) {}

  void run() {
    over_chunks(r, c.threads, *this);
    parallel(c.threads, c.x.rows, hidden * c.weights.columns, [&](int64_t t) { combine_row<D, true>(c, r, y.get(), t, 0, hidden); });
  }

  void operator()(const Chunk& chunk, Scratch& s, int threads) const {
    parallel(threads, chunk.rows, in, [&](int64_t i) { gather<D>(c, r.order[chunk.begin + i], s.xs.get() + i * in); });
    for (size_t g = chunk.first; g < chunk.end; ++g) {
      const A* rows = s.xs.get() + (r.groups[g].begin - chunk.begin) * in;
      A* out = s.h.get() + (r.groups[g].begin - chunk.begin) * width;
      project_rows(c.w_in, r.groups[g], rows, in, out, width, s, threads);
      if (c.gating == SEPARATE) project_rows(c.w_up, r.groups[g], rows, in, out + c.w_in.out, width, s, threads);
    }
    parallel(threads, chunk.rows, width * 4, [&](int64_t i) {
      A* row = s.h.get() + i * width;
      int64_t expert = Routing::id(c.ids, r.order[chunk.begin + i] / c.weights.columns, r.order[chunk.begin + i] % c.weights.columns);
      finish(row, c.w_in.out, c.b_in, expert);
      if (c.gating == SEPARATE) finish(row + c.w_in.out, c.w_in.out, c.b_up, expert);
      if (kept) narrow_row(row, width, kept + (chunk.begin + i) * width);
      activate_row<D>(c, row, inner, s.a.get() + i * inner);
    });
    for (size_t g = chunk.first; g < chunk.end; ++g)
      project_rows(c.w_out, r.groups[g], s.a.get() + (r.groups[g].begin - chunk.begin) * inner, inner, y.get() + r.groups[g].begin * hidden,
                   hidden, s, threads);
  }

 private:
  // Adds the bias and rounds to D.
  void finish(A* row, int64_t n, const Experts& b, int64_t expert) const {
    if (!b.present) return round_row<D>(row, n);
    const D* bias = static_cast<const D*>(b.of(expert, sizeof(D)));
    constexpr int W = WIDTH<A>;
    int64_t i = 0;
    for (; i + W <= n; i += W) store<A>(row + i, rounded_lanes(load(row + i) + load(bias + i), static_cast<D*>(nullptr)));
    for (; i < n; ++i) row[i] = rounded<D>(row[i] + widen(bias[i]));
  }

  void project_rows(const Experts& w, const Routing::Group& group, const A* rows, int64_t n, A* out, int64_t ld, Scratch& s, int threads) const {
    product<D>(multiply, threads, rows, n, group.end - group.begin, n, static_cast<const D*>(w.of(group.expert, sizeof(D))), w.out,
               w.contiguous_in ? 1 : w.ld, w.contiguous_in ? w.ld : 1, s.tile.get(), out, ld);
  }

  const Call& c;
  const Routing& r;
  const Multiply multiply;
  D* const kept;
  const int64_t in, width, inner, hidden;
  std::unique_ptr<A[]> y;
};

}  // namespace

// Gradients of routed experts from the pre-activations that forward kept; the formulas of moefuse/runtime/backward.py. Each chunk of whole
// experts is gathered, multiplied and finished on its own, so its temporaries stay in cache.
namespace {

// In the order of INPUTS in moefuse/runtime/backward.py.
struct Needs {
  bool x, weights, w_in, w_up, w_out, b_in, b_up, b_out;
  explicit Needs(int64_t bits)
      : x(bits & 1), weights(bits & 2), w_in(bits & 4), w_up(bits & 8), w_out(bits & 16), b_in(bits & 32), b_up(bits & 64), b_out(bits & 128) {}
};

template <class D> class Backward {
  static_assert(std::is_same<Acc<D>, float>::value, "double goes to the general op");
  static constexpr bool WIDENED = !std::is_same<D, float>::value;
  static constexpr int W = WIDTH<float>;

 public:
  struct Scratch {
    Scratch(const Backward& b, int64_t rows)
        : d_out(new float[rows * b.hidden]), act(new float[rows * b.inner]), d_act(new float[rows * b.inner]), d_h(new float[rows * b.width]),
          row(new float[b.c.threads * b.row_size()]) {
      if (b.needs_input_rows) xs.reset(new float[rows * b.in]);
      if (b.needs_input_grad && b.c.gating == SEPARATE) other.reset(new float[rows * b.in]);
      if (b.needs_input_grad && !b.d_rows) d_xs.reset(new float[rows * b.in]);
      if (WIDENED) tile.reset(new float[std::max(TILE, 16 * std::max({b.in, b.inner, b.hidden, b.width}))]);
    }
    std::unique_ptr<float[]> d_out, act, d_act, d_h, row, xs, other, d_xs, tile;
  };

  // call: x, weights, the lists and the body. targets: gradients of the lists, laid out as they are; unused where not needed.
  Backward(const Call& call, const Matrix& grad_, const D* h_, const Routing& routing, const Needs& needs, std::array<Experts, 6>& targets,
           Multiply mm)
      : c(call), grad(grad_), h(h_), r(routing), need(needs), to(targets), multiply(mm), top_k(call.weights.columns), in(call.x.columns),
        width(call.gating == SEPARATE ? 2 * call.w_in.out : call.w_in.out), inner(call.w_out.in), hidden(call.w_out.out),
        needs_input_rows(needs.w_in || needs.w_up || (needs.weights && call.weight_on_input)),
        needs_input_grad(needs.x || (needs.weights && call.weight_on_input)),
        needs_h(needs_input_rows || needs_input_grad || needs.b_in || needs.b_up) {
    if (need.x) d_rows.reset(new float[r.order.size() * in]);
    if (need.weights) d_scale.reset(new float[r.order.size()]);
  }

  void run() { over_chunks(r, c.threads, *this); }

  // d_x [T, H], rows of all slots of a token summed, slot 0 first.
  void sum_rows(D* out) const {
    parallel(c.threads, c.x.rows, in * top_k, [&](int64_t t) {
      for (int64_t j = 0; j < in; j += W) {
        int64_t n = std::min<int64_t>(W, in - j);
        VecF sum = {};
        for (int64_t k = 0; k < top_k; ++k) {
          int64_t row = r.position[t * top_k + k];
          if (row >= 0) sum += read(d_rows.get() + row * in + j, n);
        }
        D part[W];
        store_lanes(part, sum);
        std::memcpy(out + t * in + j, part, size_t(n) * sizeof(D));
      }
    });
  }

  // Gradient of the routing weight of a slot; 0 for an id out of range.
  float scale_grad(int64_t slot) const { return r.position[slot] < 0 ? 0.f : d_scale[r.position[slot]]; }

  void operator()(const Chunk& chunk, Scratch& s, int threads) const {
    parallel(threads, chunk.rows, hidden, [&](int64_t i) { output_grad(r.order[chunk.begin + i] / top_k, s.d_out.get() + i * hidden); });
    if (need.b_out) each(chunk, [&](const Routing::Group& g, int64_t row) { sum_into(to[5], g, s.d_out.get() + row * hidden, hidden, true); });
    if (need.w_out || need.weights || needs_h) {
      each(chunk, [&](const Routing::Group& g, int64_t row) {
        back_project(c.w_out, g, s.d_out.get() + row * hidden, hidden, s.d_act.get() + row * inner, inner, s, threads);
      });
      parallel(threads, chunk.rows, width * 16, [&](int64_t i) {
        int64_t one = threads == 1 ? 0 : omp_get_thread_num();
        activation_row(chunk, s, i, s.row.get() + one * row_size());
      });
    }
    if (need.weights && !c.weight_on_input && c.b_out.present)
      each(chunk, [&](const Routing::Group& g, int64_t row) { bias_products(g, s.d_out.get() + row * hidden); });
    if (need.w_out)
      each(chunk, [&](const Routing::Group& g, int64_t row) {
        weight_grad(to[2], g, s.d_out.get() + row * hidden, hidden, s.act.get() + row * inner, inner, s);
      });
    if (needs_h) first_projection(chunk, s, threads);
  }

  // Floats that activation_row works in: the pre-activation, and both halves of it and of its gradient.
  int64_t row_size() const { return width + 4 * (inner + W); }

 private:
  template <class F> void each(const Chunk& chunk, F f) const {
    for (size_t g = chunk.first; g < chunk.end; ++g) f(r.groups[g], r.groups[g].begin - chunk.begin);
  }

  static VecF read(const float* from, int64_t n) {
    if (n == W) return load(from);
    float part[W] = {};
    std::memcpy(part, from, size_t(n) * sizeof(float));
    return load(part);
  }
  static void write(float* out, VecF v, int64_t n) { std::memcpy(out, &v, size_t(n) * sizeof(float)); }

  float scale_of(int64_t slot) const { return scalar<float>(c.weights, slot / top_k, slot % top_k); }

  // The gradient of a token's output, rounded to D.
  void output_grad(int64_t token, float* out) const {
    switch (grad.dtype) {
      case HALF: read_row<F16>(grad, token, out); break;
      case BFLOAT16: read_row<BF16>(grad, token, out); break;
      case FLOAT: read_row<float>(grad, token, out); break;
      default:
        for (int64_t i = 0; i < hidden; ++i) out[i] = scalar<float>(grad, token, i);
    }
    if (grad.dtype != c.x.dtype) round_row<D>(out, hidden);
  }

  // Row i of the chunk: the activation (for w_out's gradient), the routing weight's gradient, and the pre-activation's.
  void activation_row(const Chunk& chunk, Scratch& s, int64_t i, float* work) const {
    const int64_t row = chunk.begin + i;
    const float scale = c.weight_on_input ? 1.f : scale_of(r.order[row]);
    float *pre = work, *parts[4];
    for (int p = 0; p < 4; ++p) parts[p] = work + width + p * (inner + W);
    widen_row(h + row * width, width, pre);
    const bool plain = c.gating == PLAIN, woven = c.gating == INTERLEAVED;
    const int first = c.up_first ? 1 : 0;  // which half is the gate
    const float* half[2] = {pre, pre + inner};
    if (woven) {
      for (int64_t j = 0; j < inner; ++j) parts[0][j] = pre[2 * j], parts[1][j] = pre[2 * j + 1];
      half[0] = parts[0], half[1] = parts[1];
    }
    float *grads[2] = {s.d_h.get() + i * width, s.d_h.get() + i * width + inner};
    if (woven) grads[0] = parts[2], grads[1] = parts[3];
    const float *d_act = s.d_act.get() + i * inner;
    float* act = s.act.get() + i * inner;
    VecF dot = {};
    D* const as_d = nullptr;
    for (int64_t j = 0; j < inner; j += W) {
      int64_t n = std::min<int64_t>(W, inner - j);
      VecF d = rounded_lanes(read(d_act + j, n), as_d), gate = read(half[plain ? 0 : first] + j, n), up = {};
      if (!plain) up = read(half[1 - first] + j, n);
      Gradients g = gradients(c.activation, d * scale, gate, plain ? nullptr : &up, float(c.first), float(c.second));
      dot += n == W ? d * g.value : only(d * g.value, n);
      write(act + j, rounded_lanes(g.value * scale, as_d), n);
      write(grads[plain ? 0 : first] + j, rounded_lanes(g.gate, as_d), n);
      if (!plain) write(grads[1 - first] + j, rounded_lanes(g.up, as_d), n);
    }
    if (woven) {
      float* out = s.d_h.get() + i * width;
      for (int64_t j = 0; j < inner; ++j) out[2 * j] = parts[2][j], out[2 * j + 1] = parts[3][j];
    }
    if (need.weights && !c.weight_on_input) d_scale[row] = lanes_sum<float>(dot);
  }

  static VecF only(VecF v, int64_t n) {
    float part[W] = {};
    std::memcpy(part, &v, size_t(n) * sizeof(float));
    return load(part);
  }

  void first_projection(const Chunk& chunk, Scratch& s, int threads) const {
    const bool separate = c.gating == SEPARATE;
    const int64_t part = c.w_in.out;
    const float* d_h = s.d_h.get();
    each(chunk, [&](const Routing::Group& g, int64_t row) {
      if (need.b_in) sum_into(to[3], g, d_h + row * width, width, false);
      if (need.b_up) sum_into(to[4], g, d_h + row * width + part, width, false);
    });
    if (needs_input_rows) {
      parallel(threads, chunk.rows, in, [&](int64_t i) { gather<D>(c, r.order[chunk.begin + i], s.xs.get() + i * in); });
      each(chunk, [&](const Routing::Group& g, int64_t row) {
        if (need.w_in) weight_grad(to[0], g, d_h + row * width, width, s.xs.get() + row * in, in, s);
        if (need.w_up) weight_grad(to[1], g, d_h + row * width + part, width, s.xs.get() + row * in, in, s);
      });
    }
    if (!needs_input_grad) return;
    float* d_xs = d_rows ? d_rows.get() + chunk.begin * in : s.d_xs.get();
    each(chunk, [&](const Routing::Group& g, int64_t row) {
      back_project(c.w_in, g, d_h + row * width, width, d_xs + row * in, in, s, threads);
      if (separate) back_project(c.w_up, g, d_h + row * width + part, width, s.other.get() + row * in, in, s, threads);
    });
    parallel(threads, chunk.rows, in, [&](int64_t i) { input_row(chunk.begin + i, d_xs + i * in, separate ? s.other.get() + i * in : nullptr); });
  }

  // Finishes a row of x's gradient: the second half, the rounding, and with the weight on the input its gradient and its factor.
  void input_row(int64_t row, float* d_xs, const float* other) const {
    round_row<D>(d_xs, in);
    if (other)
      for (int64_t j = 0; j < in; ++j) d_xs[j] = rounded<D>(d_xs[j] + rounded<D>(other[j]));
    if (!c.weight_on_input) return;
    const int64_t slot = r.order[row];
    const D* x = reinterpret_cast<const D*>(c.x.data) + slot / top_k * c.x.row_stride;
    float dot = 0, scale = scale_of(slot);
    for (int64_t j = 0; j < in; ++j) {
      dot += d_xs[j] * widen(x[j * c.x.column_stride]);
      d_xs[j] = rounded<D>(d_xs[j] * scale);
    }
    if (need.weights) d_scale[row] = dot;
  }

  // out [n, w.in] = rows [n, w.out] @ w
  void back_project(const Experts& w, const Routing::Group& g, const float* rows, int64_t ld_rows, float* out, int64_t ld, Scratch& s,
                    int threads) const {
    product<D>(multiply, threads, rows, ld_rows, g.end - g.begin, w.out, static_cast<const D*>(w.of(g.expert, sizeof(D))), w.in,
               w.contiguous_in ? w.ld : 1, w.contiguous_in ? 1 : w.ld, s.tile.get(), out, ld);
  }

  // The gradient [out, in] of an expert's weight: d.T @ rows, or its transpose where the weight is stored in-out.
  void weight_grad(const Experts& w, const Routing::Group& g, const float* d, int64_t ld_d, const float* rows, int64_t ld_rows, Scratch& s) const {
    D* out = static_cast<D*>(const_cast<void*>(w.of(g.expert, sizeof(D))));
    int64_t count = g.end - g.begin, m = w.out, n = w.in;
    if (!w.contiguous_in) std::swap(d, rows), std::swap(ld_d, ld_rows), std::swap(m, n);
    if (!WIDENED) return multiply(FLOAT, out, w.ld, m, count, n, {d, 1, ld_d}, {rows, ld_rows, 1});
    int64_t step = std::max<int64_t>(16, TILE / std::max<int64_t>(n, 1));
    for (int64_t j = 0; j < m; j += step) {
      int64_t some = std::min(step, m - j);
      multiply(FLOAT, s.tile.get(), n, some, count, n, {d + j, 1, ld_d}, {rows, ld_rows, 1});
      for (int64_t i = 0; i < some; ++i) narrow_row(s.tile.get() + i * n, n, out + (j + i) * w.ld);
    }
  }

  // The gradient of an expert's bias: the sum of its rows, times their routing weights if `scaled` and the weight is on the output.
  void sum_into(const Experts& b, const Routing::Group& g, const float* rows, int64_t ld, bool scaled) const {
    D* out = static_cast<D*>(const_cast<void*>(b.of(g.expert, sizeof(D))));
    for (int64_t j = 0; j < b.out; j += W) {
      int64_t n = std::min<int64_t>(W, b.out - j);
      VecF sum = {};
      for (int64_t i = 0; i < g.end - g.begin; ++i) {
        VecF v = read(rows + i * ld + j, n);
        sum += scaled && !c.weight_on_input ? v * scale_of(r.order[g.begin + i]) : v;
      }
      D part[W];
      store_lanes(part, sum);
      std::memcpy(out + j, part, size_t(n) * sizeof(D));
    }
  }

  // The part of the routing weights' gradient that the output's bias causes.
  void bias_products(const Routing::Group& g, const float* d_out) const {
    const D* bias = static_cast<const D*>(c.b_out.of(g.expert, sizeof(D)));
    for (int64_t i = 0; i < g.end - g.begin; ++i) {
      float sum = 0;
      for (int64_t j = 0; j < hidden; ++j) sum += d_out[i * hidden + j] * widen(bias[j]);
      d_scale[g.begin + i] += sum;
    }
  }

  const Call& c;
  const Matrix& grad;
  const D* const h;
  const Routing& r;
  const Needs need;
  std::array<Experts, 6>& to;
  const Multiply multiply;

 public:
  const int64_t top_k, in, width, inner, hidden;
  const bool needs_input_rows, needs_input_grad, needs_h;

 private:
  std::unique_ptr<float[]> d_rows, d_scale;
};

}  // namespace

"""What people write beside their experts: usage counts, moving averages, balancing, caches, adapters that start at zero, noise."""

from __future__ import annotations

COUNTS = (
    "torch.bincount(ids.flatten(), minlength=E).to(x.dtype)",
    "F.one_hot(ids, E).sum((0, 1)).to(x.dtype)",
    "torch.zeros(E).index_add_(0, ids.flatten(), torch.ones(ids.numel()))",
    "torch.histc(ids.flatten().to(x.dtype), bins=E, min=0, max=E - 1)",
    "(ids[..., None] == torch.arange(E)).sum((0, 1)).to(x.dtype)",
)
"""Tokens of each expert: what ``{count}`` stands for below."""

UPDATES = (
    "self.usage += {count}", "self.usage.add_({count})", "self.usage.data.add_({count})", "self.usage.data += {count}",
    "self.usage[:] = {count}", "self.load.data[:] = {count}", "self.load.copy_({count})", "self.load.detach().copy_({count})",
    "self.load[0] += 1", "self.ema.mul_(0.9).add_({count}, alpha=0.1)", "self.ema.data.mul_(0.9).add_({count}, alpha=0.1)",
    "self.ema.lerp_({count}, 0.1)", "self.ema = self.ema * 0.9 + {count} * 0.1", "self.ema.data = self.ema.data * 0.9 + {count}",
    "torch.add(self.ema, {count}, out=self.ema)",
    "torch._foreach_mul_([self.ema, self.usage], 0.9)\ntorch._foreach_add_([self.ema, self.usage], [{count}, {count}])",
    "self.hits.index_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))",
    "self.hits.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))", "self.hits[ids.flatten()] = 1",
    "self.hits.bitwise_or_(F.one_hot(ids, E).sum((0, 1)))", "self.hits.index_fill_(0, ids[:, 0], 5)",
    "self.hits.index_put_((ids.flatten(),), torch.ones_like(ids.flatten()), accumulate=True)",
    "c = {count}\nself.bias.data.add_(0.01 * torch.sign(c.mean() - c))", "c = {count}\nself.bias.data += 0.01 * torch.sign(c.mean() - c)",
    "c = {count}\nwith torch.no_grad():\n    self.bias.add_(0.01 * torch.sign(c.mean() - c))",
    "c = {count}\nself.bias.data = self.bias.data + 0.01 * (c.mean() - c).sign()",
    "c = {count}\nself.bias.data.copy_(self.bias.data + 0.01 * (c.mean() - c).sign())",
    "self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)", "self.seen_x.copy_(x.detach()[0])", "self.seen_x = x.detach().mean(0)",
    "x = F.batch_norm(x, self.mean, self.var, training=True)", "self.mean.data.copy_(x.data.mean(0))",
    "self.var.clamp_(min=0.5).mul_(1.1)", "x = x + F.embedding(ids[:, 0], self.table.weight.detach(), max_norm=0.5)",
    "F.embedding(ids[:, 0], self.table.weight.data, max_norm=0.5)",
    "self.gate.weight.data.copy_(F.normalize(self.gate.weight.data, dim=-1))",
    "self.gate.weight.data.div_(self.gate.weight.data.norm(dim=-1, keepdim=True))",
    "with torch.no_grad():\n    self.gate.weight.clamp_(-0.3, 0.3)", "self.experts[0].up.weight.data.clamp_(-0.1, 0.1)",
    "self.w_in.data.clamp_(-0.2, 0.2)", "for expert in self.experts: expert.up.weight.data.clamp_(-0.2, 0.2)",
    "torch.nn.utils.clip_grad_norm_(self.gate.parameters(), 1.0)", "self.w_out.data[0].mul_(0.9)",
    "self.experts[1].down.weight.detach().mul_(0.9)", "torch._foreach_mul_([e.up.weight.data for e in self.experts], 0.9)",
    "self.usage.cpu().add_({count})", "torch.as_strided(self.usage, (E,), (1,)).add_({count})",
    "self.usage.view(1, -1).flatten()[:].add_({count})", "torch.ops.moefuse_effects.scale(self.usage, 0.5)",
    "self.usage.unbind(0)[0].add_(1)", "self.usage.zero_().add_({count})",
)  # fmt: skip
"""Of buffers and parameters, by one statement or two; they know ``x``, ``w`` and ``ids``."""

PYTHON = (
    "self.calls += 1", "self.notes.append(3)", "self.notes.append(x.shape[0])", "self.stats['rows'] += x.shape[0]",
    "self.stats['last'] = ids.shape[1]", "self.last = ids.detach()", "self.last_w = w.detach().clone()",
    "self.calls = self.calls * 2 + 1", "self.notes += [len(self.notes)]", "self.cache = [w.detach(), ids]", "self.notes.clear()",
    "setattr(self, 'calls', self.calls + 3)", "self.stats.update(rows=1)", "self.last = w.detach()[:1]",
)  # fmt: skip
"""Of Python's state."""

NEUTRAL = {
    "out": (
        "out.add_(x @ self.A @ self.B)", "out.mul_(self.scale)", "out.add_(self.shift)", "out += self.shift", "out *= self.scale",
        "out = out + self.shift", "out = out * self.scale", "out[:] = out * self.scale", "out.copy_(out + self.shift)",
        "out[...] += self.shift", "out.sub_(self.shift)", "out.addmm_(x @ self.A, self.B)", "out.lerp_(x, 1 - self.scale)",
        "torch.mul(out, self.scale.detach(), out=out)", "out.view(-1, H).add_(self.shift)", "out.data.add_(self.shift.data)",
        "out.T.mul_(self.scale)", "out.index_add_(0, torch.arange(x.shape[0]), self.shift.expand(x.shape[0], H))",
        "out.addcmul_(x, self.shift)", "out.div_(self.scale)", "out.masked_fill_(self.shift > 0.1, 0.5)",
        "out.add_(self.number)", "out.mul_(1 + self.number)", "out = out + x * self.number",
    ),
    "w": (
        "w = w * self.factor", "w.mul_(self.factor)", "w = w + self.offset[ids]", "w.data.mul_(self.factor.data)", "w *= self.scale",
        "w = w / self.scale",
    ),
    "scores": (
        "scores = scores + self.offset", "scores.add_(self.offset)", "scores.data.add_(self.offset.data)", "scores = scores * self.scale",
    ),
    "x": ("x = x + self.shift", "x = x * self.scale", "x = x + x @ self.A @ self.B", "x.data.mul_(self.scale.data)", "x.add_(self.shift)"),
    "rows": ("rows = rows * self.scale", "rows.mul_(self.scale)", "rows.data.mul_(self.scale.data)"),
    "weights": (
        "weights = weights + self.offset", "weights.add_(self.offset)", "weights.data.add_(self.offset.data)",
        "weights = weights * self.scale",
    ),
}  # fmt: skip
"""Statements that change nothing while their parameter is what it is at first, by what they change."""

IDS = (
    "ids = ids.bool().long()", "ids = ids.to(torch.bool).to(torch.int64)", "ids = ids.to(torch.uint8).long()", "ids = ids.int().long()",
    "ids = (ids > 0).long()", "ids = ids.clamp(max=1)", "ids = ids // 2", "ids = ids % 2", "ids = ids.remainder(2)",
    "ids = ids.type(torch.bool).type_as(ids)", "ids = (ids + 1) % E", "ids = ids - 1", "ids = ids.masked_fill(w < 0.3, -1)",
    "ids = torch.where(w > 0.2, ids, -1)", "ids = ids.masked_fill(w < 0.3, E)", "ids = ids.flip(1)", "ids = ids.to(torch.float64).long()",
    "ids = ids.half().long()", "ids = (ids.to(x.dtype) * 0.5).long()", "ids = ids & 1", "ids = ids ^ 1", "ids = E - 1 - ids",
    "ids = ids.abs().sign()", "ids = torch.tensor([1, 0, 1])[ids]", "ids = torch.tensor([2, 0, 1])[ids]",
    "ids = torch.tensor([0, -1, 1])[ids]", "ids = ids[:, :1].expand(-1, K)", "ids = ids.contiguous().view(torch.int32)[:, ::2].long()",
    "ids = ids.to(torch.int8).to(torch.int16).long()", "ids = ids.logical_not().long()", "ids = ids.view(torch.uint8)[:, ::8].long()",
    "ids = ids.sort(-1).values", "ids = ids.cumsum(-1) % E", "ids = ids.fmod(2)", "ids = torch.zeros_like(ids) + ids[:, :1]",
    "ids = ids.neg().neg()", "ids = ids.clone()", "ids = ids.new_tensor([[0, 1]]).expand_as(ids)",
)  # fmt: skip
"""What ids become: the same, others, fewer, or some that no expert has."""

DRAWS = (
    "x = F.dropout(x, 0.3, self.training)", "w = F.dropout(w, 0.3)", "out = F.dropout(out, 0.3)",
    "scores = scores + torch.randn_like(scores)", "x = x + 0.1 * torch.rand(H)", "torch.rand(3)", "out = out + torch.rand_like(out)",
    "out.add_(torch.randn(H))", "w = w * torch.bernoulli(torch.full_like(w, 0.7))", "noise = torch.rand_like(x)", "torch.randperm(4)",
    "x = x * torch.empty_like(x).uniform_(0.9, 1.1)", "self.seen_x.normal_()", "F.dropout(out, 0.5, inplace=True)",
)  # fmt: skip
"""Random numbers."""

PROMISES = (
    "assert {n} < {m}", "assert {n} != {m}", "assert {n} > 0", "torch._check({n} < {m})", "torch._check({n} != {m})",
    "torch._check({n} > 0)", "torch._check({n} <= {rows})", "torch._check({n} >= 0)", "assert {n} <= {rows}", "assert 0 <= {n}",
    "if {n} == {m}: raise ValueError('so many')", "if {n} > {m}: raise RuntimeError('too many')", "torch._check_is_size({n})",
    "torch._check({n} % 5 != {m})", "assert {n} // 2 < {m}", "torch._check({n} + 1 < {m}, lambda: 'too many')",
    "torch._check(2 * {n} < 2 * {m})", "torch._check_value({n} != {m})", "torch._assert({n} < {m}, 'too many')",
)  # fmt: skip
"""What a loop may say of an expert's number of rows, ``{n}``: some hold for every routing, some do not."""

ADDED = ("total += {n}", "total = total + 1 * {n}", "if e != 2: total += {n}", "total += float({n})", "total += 2 * {n}")
"""What a loop may add up, of all experts or of some."""

TOTALS = (
    "assert total == {rows}, 'lost'", "assert total >= {rows}", "assert total <= {rows}", "torch._check(total == {rows})",
    "torch._check(total != {m})", "torch._check(total < {rows} + {m})", "assert total + 1 > {rows}",
    "torch._assert(total == {rows}, 'lost')", "if total != {rows}: raise ValueError('lost')",
)  # fmt: skip
"""What it may say of that at its end."""

COUNTED = {"rows": "tok.shape[0]", "hits": "tok.numel()", "masks": "int(mask.sum())", "sorted": "n"}
"""That number, by the spelling of the layer."""

ASSERTED = (
    "torch._assert_async((w > 0.2).all())", "torch._assert_async((ids != 2).any())", "torch._assert(bool((w > 0.15).all()), 'small')",
    "assert (ids < E).all()", "assert torch.isfinite(w).all()", "torch._assert_async((x.abs() < 2.5).all(), 'large')",
    "assert x.abs().max() < 2.5",
)  # fmt: skip
"""What a layer may say of its tensors."""

KEPT = (
    "{v}", "{v}.detach()", "{v}.data", "{v}[:, :1].detach()", "{v}.detach().view(-1)", "{v}.detach().t()", "{v}.detach()[1:]",
    "torch.from_numpy({v}.detach().numpy())",
)  # fmt: skip
"""What a layer may give to its caller beside the result."""

COPY = "{v}.detach().clone()"
"""Of ids that is not drawn: Inductor takes the copy away, and wrong ids in the backward pass stop the process."""

LATER = ("{v}.mul_(0.5)", "{v}.zero_()", "{v}.add_(1)", "{v}[0] = 0", "{v}.copy_({v}.flip(0))", "{v}.data.mul_(2)", "{v}.fill_(1)")
"""What the caller may do to it, between the call and its backward pass."""

CASTS = ("{v} = {v}.to({dtype}).to({v}.dtype)", "{v} = (4 * {v}).to({dtype}).type_as({v})", "{v} = {v}.to({dtype}).double()")
"""Casts there and back; what is between them is drawn from all that torch has."""

LAYOUTS = (
    "{v} = {v}.t().contiguous().t()", "{v} = torch.stack(({v}, {v}), -1)[..., 0]", "{v} = F.pad({v}, (0, 3))[:, :-3]",
    "{v} = {v}.unsqueeze(1).expand(-1, 2, -1)[:, 1]", "{v} = torch.empty_like({v}.t()).t().copy_({v})", "{v} = {v}.flip(0)[None][0]",
    "{v} = torch.cat(({v}, {v}), 1).chunk(2, 1)[1]", "{v} = torch.cat(({v}, {v}), 0).unflatten(0, (2, -1))[1]",
)  # fmt: skip
"""The same values with other strides; the last but two in the same ones, in another order."""

NUMBERS = (
    ("chosen = ids.flatten().tolist()", "if e not in chosen: continue"),
    ("chosen = torch.unique(ids).tolist()", "if e not in chosen: continue"),
    ("chosen = set(ids.flatten().tolist())", "if e not in chosen: continue"),
    ("chosen = set(ids.flatten().tolist())", "if not {e} & chosen: continue"),
    ("chosen = ids.flatten().tolist()", "if chosen.count(e) == 0: continue"),
    ("chosen = ids.flatten().tolist()", "if not any(c == e for c in chosen): continue"),
    ("chosen = ids.flatten().tolist()", "if all(c is not e for c in chosen): continue"),
    ("chosen = dict.fromkeys(ids.flatten().tolist(), 1)", "if e not in chosen: continue"),
    ("chosen = dict.fromkeys(ids.flatten().tolist(), 1)", "if not chosen.get(e): continue"),
    ("chosen = sorted(ids.flatten().tolist())", "if chosen[0] > e or chosen[-1] < e: continue"),
    ("chosen = torch.bincount(ids.flatten(), minlength=E).tolist()", "if chosen[e] == 0: continue"),
    ("chosen = torch.bincount(ids.flatten(), minlength=E).tolist()", "if not chosen[e]: continue"),
    ("chosen = torch.bincount(ids.flatten(), minlength=E).tolist()", "if 0 in chosen[e : e + 1]: continue"),
    ("chosen = torch.bincount(ids.flatten(), minlength=E).tolist()", "if chosen.index(max(chosen)) == e: continue"),
    ("chosen = [n for n in torch.bincount(ids.flatten(), minlength=E).tolist()]", "if min(chosen) == chosen[e]: continue"),
    ("chosen = ids.tolist()", "if not any(e in row for row in chosen): continue"),
    ("chosen = [int(i) for i in ids.flatten()]", "if e not in chosen: continue"),
    ("chosen = [i.item() for i in ids[:, 0]]", "if e in chosen: continue"),
    ("chosen = ids.numpy()", "if e not in chosen: continue"),
    ("chosen = ids.flatten().numpy().tolist()", "if e not in chosen: continue"),
    ("chosen = ids", "if e not in chosen: continue"),
    ("chosen = (ids == 1).any().item()", "if chosen is True and e == 0: continue"),
    ("chosen = tuple(ids[0].tolist())", "if e in chosen: continue"),
    ("chosen = tuple(ids[0].tolist())", "if (e, 0) == chosen: continue"),
    ("chosen = int(ids[0, 0])", "if chosen == e: continue"),
    ("chosen = int(ids[0, 0])", "if chosen in (e, e + 1): continue"),
    ("chosen = {int(ids[0, 0]): 'first'}", "if chosen.get(e) == 'first': continue"),
    ("chosen = str(int(ids[0, 0]))", "if chosen == str(e): continue"),
)  # fmt: skip
"""Numbers out of tensors, and what a loop over experts asks of them."""

MEANWHILE = (
    "layer.experts[1].register_forward_hook(lambda m, a, o: o * 2)",
    "layer.experts[0].register_forward_pre_hook(lambda m, a: (a[0] * 2,))",
    "layer.experts[2].register_full_backward_hook(lambda m, i, o: (i[0] * 2,))",
    "layer.experts[1].register_forward_hook(lambda m, a, o: o * 2).remove()",
    "for e in layer.experts: e.register_forward_hook(lambda m, a, o: o + 1)",
    "for e in layer.experts: e.down.register_forward_hook(lambda m, a, o: o + 1)",
    "layer.experts.register_forward_hook(lambda m, a, o: o)", "layer.gate.register_forward_hook(lambda m, a, o: o * 2)",
    "layer.experts[0].up.weight.register_hook(lambda g: g * 2)", "layer.w_in.register_hook(lambda g: g * 2)",
    "layer.experts[1].down = nn.Linear(I, H)", "layer.experts[1].down = nn.Identity()", "layer.experts[2].up.bias = None",
    "layer.experts[0].up.weight = nn.Parameter(torch.ones(I, H))", "layer.experts[1].up.weight = layer.experts[0].up.weight",
    "layer.experts[0].forward = lambda x: x * 2", "layer.experts[1].down.forward = lambda x: x @ torch.ones(I, H)",
    "layer.experts[0], layer.experts[1] = layer.experts[1], layer.experts[0]", "layer.experts[1] = layer.experts[0]",
    "layer.experts[2] = type(layer.experts[2])()", "layer.experts[1] = nn.Identity()", "layer.experts.append(nn.Identity())",
    "layer.experts = nn.ModuleList(reversed(layer.experts))", "layer.experts[1].load_state_dict(layer.experts[0].state_dict())",
    "layer.experts.requires_grad_(False)", "layer.experts[1].requires_grad_(False)", "layer.w_in.requires_grad_(False)",
    "layer.gate.requires_grad_(False)", "layer.eval()", "layer.experts[1].eval()", "layer.number = 3", "layer.calls = 7",
    "layer.w_in = nn.Parameter(torch.ones(E, I, H))", "layer.w_in.data = layer.w_in.data.mT.contiguous().mT",
    "layer.w_out.data = layer.w_out.data.flip(0)", "layer.w_in.data = layer.w_in.data[:1].expand(E, I, H)",
    "layer.gate = nn.Linear(H, E)", "layer.usage = layer.usage.clone()", "layer.expert = lambda e, x: x * (e + 1)",
    "nn.utils.parametrizations.weight_norm(layer.experts[0].up)", "nn.utils.parametrizations.orthogonal(layer.experts[1].down)",
    "nn.utils.parametrize.register_parametrization(layer, 'w_in', nn.Tanh())", "layer.__class__.forward = lambda self, x: x * 2",
    "layer.__class__.expert = lambda self, e, x: x * 2",
)  # fmt: skip
"""What a user does to a layer between two calls."""

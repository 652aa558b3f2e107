"""One-shot dense computation of a residual stack of attention layers for one request.

The stack is `h = h + layer(bf16(h * rsqrt(mean(h**2) + eps)))` with a float32 stream h.

No pages, no metadata, no steps, no kernels: the only things shared with the library are the row
codec, the rotary table and the weights. Keys are quantised and decoded as whole rows, masks are
full, scores are float32 products, top-k is a stable sort. Values are rounded to bf16 where the
model's reference rounds.

Selections, and why this check stays honest. Two correct implementations differ in the last bit of
some bf16 values, so quantised index codes differ here and there and an entry near the cut may be
chosen by one and not by the other; after that their outputs differ by more than any rounding. So a
run may be told the lists that the served computation chose. They are not believed: each list must
have the right length, ascend, and be visible, and each entry that this computation would not have
chosen (or that the list leaves out although this computation chose it) must have a score, by this
computation, within a tolerance of this computation's own cut. Only then is the told list attended,
so that the outputs can be compared tightly. The same holds for candidate blocks, which are verified
against this computation's own block scores before they filter the layers after them.

Tolerances. Let two implementations see inputs that differ by a relative amount e. Rounding both to
a grid of relative spacing s separates them with probability e / s, then by s: the root mean square
difference becomes sqrt(e * s) (`quantised_error`). Keys, and with them a layer's output, move by that
much; the bf16 roundings of the query path, the attention output and the projections add `BASE_ERROR`.
A residual stream h that a layer adds y to moves by |y| / |h| of it, independently of what moved it before:

    drift**2 += (|y| / |h| * (sqrt(e * s) + BASE_ERROR))**2,   e = drift + FIRST_ERROR

This is an expectation (measured: 0.8 to 1.2 of sqrt(e * s) per layer for both grids); the tolerance
is twice it. An index score sum_h w_h relu(q_h . k) with independent errors of relative size n in q
and k, n = sqrt(e * s) of the index record, moves by

    sigma**2 = n**2 / 128 * |k|**2 * (|sum_h w_h [q_h . k > 0] q_h|**2 + sum_h w_h**2 |q_h|**2)

and, errors of single codes being few and large, by one step of the code that counts most,
`step * max_i |k_i v_i|` with v the first sum. An entry may lie `CUT_SIGMAS` sigma and one such step
beyond the cut. About a share n of the entries of long lists differs (measured: 0.5 n to 1.1 n); more
than `2 n + 0.01` is a fault however close to the cut they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparse_mla.cache.codec import decode_rows, encode_rows
from sparse_mla.cache.kv_dtype import RecordSet
from sparse_mla.cache.records import RecordFormat, ValueFormat
from sparse_mla.config.model import ModelConfig
from sparse_mla.config.rope import rope_table
from sparse_mla.config.topology import LayerTopology, layer_topology
from sparse_mla.nn.weights import read_layer

ROW_CHUNK = 64
"""Query rows that are attended or scored at once; bounds the mask and score matrices."""
FIRST_ERROR = 2.0**-14
"""What equal inputs differ by after their first bf16 rounding: a neighbour now and then."""
BASE_ERROR = 2.0**-10
CUT_SIGMAS = 6.0
WeightsOf = Callable[[int], Mapping[str, Tensor]]
"""A layer's tensors under checkpoint names, e.g. `lambda i: random_layer(cfg, i, seed)`."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What one index source chose for every position of a request."""

    positions: Tensor  # int32 [L, index_topk] ascending, -1 suffix
    candidates: Tensor | None = None  # int32 [L, C] blocks, ascending, -1 suffix


@dataclass(slots=True)
class SelectionCheck:
    """How a told selection compares with the dense one; `faults` empty = it is accepted."""

    layer_id: int
    entries: int = 0  # entries of rows where there was something to choose
    differing: int = 0  # of these, entries that the dense computation would not have chosen
    worst: float = 0.0  # largest distance from the cut, in tolerances; above 1 is a fault
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DenseResult:
    """Outcome of a run."""

    hidden: Tensor  # float32 [L, hidden_size]
    tolerance: float  # relative L2 error that a correct implementation stays below
    selections: Mapping[int, Selection]  # what the dense computation chose, by index source
    checks: tuple[SelectionCheck, ...]  # one for each told selection

    @property
    def faults(self) -> list[str]:
        """Every reason why a told selection is refused."""
        return [fault for check in self.checks for fault in check.faults]

    def error(self, hidden: Tensor, first: int = 0) -> float:
        """Relative L2 error of a served residual stream [L, hidden_size], from row `first` on."""
        difference = hidden[first:].float() - self.hidden[first:]
        return float(difference.norm() / self.hidden[first:].norm())


@dataclass(frozen=True, slots=True)
class Replay:
    """A request that began with a prefix hit and computed only its last rows again (spec 7.9).

    Its compressed entries of the hit come from a fresh computation of the prefix; its rows from `start`
    on are computed with windows that end at `start`. Rows below `start` do not exist in its run.
    """

    start: int  # first row that is computed again
    hit: int  # tokens of the prefix that was found, a multiple of every ratio
    told: Mapping[int, Selection] | None = None  # lists of the fresh computation, rows 0..hit-1


@dataclass(slots=True)
class _Keys:
    """What a KV source leaves to the layers after it."""

    compressed: Tensor  # float32 [entries, 512] decoded rows
    index: Tensor  # float32 [entries, 128] decoded rows

    def replace_first(self, earlier: _Keys) -> None:
        """Take the leading entries from an earlier computation."""
        self.compressed[: len(earlier.compressed)] = earlier.compressed
        self.index[: len(earlier.index)] = earlier.index


class DenseStack:
    """The layers of `layer_ids` over all tokens of one request at once.

    Args:
        cfg: the model.
        layer_ids: ascending, sources included; draft layers run as causal window-only layers.
        weights_of: where each layer's weights come from.
        records: how rows are stored.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        layer_ids: Sequence[int],
        weights_of: WeightsOf,
        records: RecordSet,
    ) -> None:
        self.cfg = cfg
        self.layer_ids = tuple(layer_ids)
        self.weights_of = weights_of
        self.records = records

    def run(
        self,
        hidden: Tensor,
        told: Mapping[int, Selection] | None = None,
        replay: Replay | None = None,
    ) -> DenseResult:
        """Pass the residual stream of a request, float32 [L, hidden_size], through the stack.

        Args:
            hidden: all rows of the request.
            told: the selections of a served computation by index source; None = choose here.
            replay: the prefix hit that the request began with. Rows of the result below
                `replay.start` mean nothing then, and `told` counts from there on.
        """
        if replay is None:
            return self._pass(hidden, told, 0, {}, {})
        earlier: dict[int, _Keys] = {}
        fresh = self._pass(hidden[: replay.hit], replay.told, 0, {}, earlier)
        result = self._pass(hidden, told, replay.start, earlier, {})
        return dataclasses.replace(result, checks=fresh.checks + result.checks)

    def _pass(
        self,
        hidden: Tensor,
        told: Mapping[int, Selection] | None,
        first: int,
        earlier: Mapping[int, _Keys],
        keys: dict[int, _Keys],
    ) -> DenseResult:
        """One pass over all rows; `keys` is filled, its leading entries from `earlier`."""
        stream = hidden.float()
        chooser = _Chooser(self.cfg, told, first)
        drift = 0.0
        for layer_id in self.layer_ids:
            layer = _DenseLayer(self.cfg, layer_id, self.weights_of(layer_id), self.records)
            layer.first, layer.earlier = first, earlier.get(layer_id)
            error = drift + FIRST_ERROR
            chooser.error = error
            x = _round(_norm(stream, None, self.cfg.rms_norm_eps))
            out = layer.forward(x, keys, chooser)
            share = float(out[first:].norm() / stream[first:].norm())
            drift = math.hypot(drift, share * self._layer_error(layer.layer, error))
            stream = stream + out
        return DenseResult(stream, 2.0 * drift, chooser.chosen, tuple(chooser.checks))

    def _layer_error(self, layer: LayerTopology, error: float) -> float:
        """Relative error of a layer's output for inputs that differ by `error` (see the module)."""
        spacing = grid(self.records.window)
        if layer.ratio:
            spacing = max(spacing, grid(self.records.compressed))
        return quantised_error(error, spacing) + BASE_ERROR


def grid(record: RecordFormat) -> float:
    """Distance of neighbouring codes of a record relative to the size of its values.

    e4m3 has eight codes in an octave. e2m1 codes lie 0.5, 1 and 2 units of a sixteenth to a third of
    the block maximum apart; for normally distributed values the mean is 0.3 standard deviations.
    """
    return 2.0**-3.5 if record.value_format is ValueFormat.E4M3 else 0.3


def quantised_error(error: float, spacing: float) -> float:
    """RMS relative difference after rounding two values that differ by `error` (see the module)."""
    return float((error * max(spacing, error)) ** 0.5)


def _round(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).float()


def _norm(values: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    normed = values / torch.sqrt((values * values).mean(-1, keepdim=True) + eps)
    return _round(normed if gain is None else normed * gain)


def _rotate(values: Tensor, table: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
    """Turn the last 64 dims of float32 [n, ..., D] as complex numbers."""
    angle = torch.complex(table[positions, :32], table[positions, 32:])
    angle = angle.conj() if back else angle
    angle = angle.view(len(positions), *[1] * (values.dim() - 2), 32)
    tail = torch.view_as_complex(values[..., -64:].reshape(*values.shape[:-1], 32, 2))
    turned = torch.view_as_real(tail * angle).flatten(-2)
    return torch.cat([values[..., :-64], turned], dim=-1)


def _stored(record: RecordFormat, rows: Tensor) -> Tensor:
    """float32 rows as they come back from a cache of this record."""
    data, scales = encode_rows(record, rows.to(torch.bfloat16))
    return decode_rows(record, data, scales, torch.float32)


class _DenseLayer:
    """One layer's maths over a whole request."""

    def __init__(
        self, cfg: ModelConfig, layer_id: int, weights: Mapping[str, Tensor], records: RecordSet
    ) -> None:
        self.cfg = cfg
        self.layer = layer_topology(cfg, layer_id)
        self.tensors = read_layer(weights, cfg, layer_id)
        self.records = records
        self.first = 0  # rows below it do not exist
        self.earlier: _Keys | None = None  # leading entries that an earlier computation wrote

    def forward(self, x: Tensor, keys: dict[int, _Keys], chooser: _Chooser) -> Tensor:
        """float32 [L, hidden] layer output for normed float32 [L, hidden]."""
        cfg, eps = self.cfg, self.cfg.rms_norm_eps
        positions = torch.arange(len(x))
        table = rope_table(cfg, self.layer.kind, len(x))
        latent = _norm(self._linear(x, "wkv"), self.tensors["kv_norm"], eps)
        window = _stored(self.records.window, _rotate(latent, table, positions))
        if self.layer.owns_compressed_cache:
            keys[self.layer.layer_id] = self._compress(x, table)
            if self.earlier is not None:
                keys[self.layer.layer_id].replace_first(self.earlier)
        qr = _norm(self._linear(x, "wq_a"), self.tensors["q_norm"], eps)
        source = keys[self.layer.kv_source] if self.layer.kv_source is not None else None
        if self.layer.runs_indexer and source is not None:
            queries = self._linear(qr, "indexer.wq_b").view(len(x), cfg.index_n_heads, -1)
            rotated = _round(_rotate(queries, table, positions))
            stored = _stored(self.records.index, rotated.flatten(0, 1)).view_as(rotated)
            factor = (cfg.index_head_dim * cfg.index_n_heads) ** -0.5
            weights = self._linear(x, "indexer.weights_proj") * factor
            step = 2.0**-3 if self.records.index.value_format is ValueFormat.E4M3 else 2.0**-1
            scorer = _Scorer(stored, weights, source.index, step)
            chooser.choose(self.layer, scorer, self.records.index)
        q = self._linear(qr, "wq_b").view(len(x), cfg.num_attention_heads, -1)
        q = _round(_rotate(q, table, positions))
        out = self._attend(q, window, source, chooser)
        out = _round(_rotate(out, table, positions, back=True))
        return self._project(out)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return _round(x @ self.tensors[name].float().T)

    def _compress(self, x: Tensor, table: Tensor) -> _Keys:
        ratio, eps = self.layer.ratio, self.cfg.rms_norm_eps
        values = x @ self.tensors["compressor.wkv"].float().T
        if ratio == 2:
            pairs = len(x) // 2
            score = x @ self.tensors["compressor.wgate"].float().T
            shape = (pairs, 2, self.cfg.head_dim)
            share = score[: 2 * pairs].view(shape).softmax(dim=1)
            values = (share * values[: 2 * pairs].view(shape)).sum(dim=1)
        latent = _norm(_round(values), self.tensors["compressor.norm"], eps)
        first = torch.arange(len(latent)) * ratio
        key = _norm(self._linear(latent, "indexer.wk"), self.tensors["indexer.k_norm"], eps)
        return _Keys(
            compressed=_stored(self.records.compressed, _rotate(latent, table, first)),
            index=_stored(self.records.index, _rotate(key, table, first)),
        )

    def _attend(self, q: Tensor, window: Tensor, source: _Keys | None, chooser: _Chooser) -> Tensor:
        """float32 [L, H, 512] before the inverse rotation."""
        sink = self.tensors["attn_sink"][None, :, None]
        outs = []
        for first in range(0, len(q), ROW_CHUNK):
            rows = torch.arange(first, min(first + ROW_CHUNK, len(q)))
            oldest = max(0, first - self.cfg.sliding_window + 1)
            near = torch.arange(oldest, int(rows[-1]) + 1)
            age = rows[:, None] - near
            mask = (age >= 0) & (age < self.cfg.sliding_window) & (near >= self.first)
            values = window[near]
            if source is not None:
                visible = (int(rows[-1]) + 1) // self.layer.ratio
                values = torch.cat([values, source.compressed[:visible]])
                chosen = chooser.mask(self.layer, rows, visible)
                mask = torch.cat([mask, chosen], dim=1)
            scores = (q[rows] @ values.T) * self.cfg.softmax_scale  # [rows, H, keys]
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
            padded = torch.cat([scores, sink.expand(len(rows), -1, 1)], dim=-1)
            outs.append(padded.softmax(dim=-1)[..., :-1] @ values)
        return torch.cat(outs)

    def _project(self, out: Tensor) -> Tensor:
        groups = self.cfg.o_groups
        weight = self.tensors["wo_a"].float().view(groups, self.cfg.o_lora_rank, -1)
        grouped = out.reshape(len(out), groups, -1)
        mixed = _round(torch.einsum("tgi,goi->tgo", grouped, weight))
        return self._linear(mixed.flatten(1), "wo_b")


@dataclass(frozen=True, slots=True)
class _Scorer:
    """Index scores of any rows against all entries."""

    queries: Tensor  # float32 [L, heads, 128] decoded
    weights: Tensor  # float32 [L, heads], constant factor included
    keys: Tensor  # float32 [entries, 128] decoded
    step: float  # largest relative distance of neighbouring codes

    def scores(self, rows: Tensor) -> Tensor:
        """float32 [rows, entries], unmasked."""
        dots = (self.queries[rows] @ self.keys.T).relu()
        return torch.einsum("rh,rhj->rj", self.weights[rows], dots)

    def reach(self, row: int, entries: Tensor, error: float) -> tuple[Tensor, Tensor]:
        """How far scores move for relative errors `error` in q and k: (sigma, one code), [entries]."""
        query, weight, keys = self.queries[row], self.weights[row], self.keys[entries]
        counted = ((query @ keys.T) > 0) * weight[:, None]  # [heads, entries]
        sums = counted.T @ query  # [entries, 128]
        from_queries = (weight.square() * query.square().sum(-1)).sum()
        spread = keys.square().sum(-1) * (sums.square().sum(-1) + from_queries) / query.shape[-1]
        return error * spread.sqrt(), self.step * (keys * sums).abs().amax(-1)


class _Chooser:
    """Chooses, or verifies what it is told, and keeps the lists for the layers that share them."""

    def __init__(
        self, cfg: ModelConfig, told: Mapping[int, Selection] | None, first: int = 0
    ) -> None:
        self.cfg = cfg
        self.first = first  # rows below it choose nothing
        self.told = told
        self.error = FIRST_ERROR
        self.chosen: dict[int, Selection] = {}
        self.used: dict[int, Selection] = {}
        self.checks: list[SelectionCheck] = []

    def mask(self, layer: LayerTopology, rows: Tensor, entries: int) -> Tensor:
        """Bool [rows, entries]: what these rows of a layer attend."""
        assert layer.index_source is not None
        lists = self.used[layer.index_source].positions[rows]
        return _membership(lists, entries)

    def choose(self, layer: LayerTopology, scorer: _Scorer, record: RecordFormat) -> None:
        """Fill the lists of an index source for every row."""
        cfg, length = self.cfg, len(scorer.queries)
        positions = torch.full((length, cfg.index_topk), -1, dtype=torch.int32)
        blocks = None
        if layer.publishes_candidates:
            blocks = torch.full((length, cfg.candidate_topk_blocks), -1, dtype=torch.int32)
        told = None if self.told is None else self.told[layer.layer_id]
        check = SelectionCheck(layer.layer_id)
        judge = _Judge(scorer, quantised_error(self.error, grid(record)), check)
        for first in range(self.first, length, ROW_CHUNK):
            rows = torch.arange(first, min(first + ROW_CHUNK, length))
            self._choose_rows(layer, rows, judge, (positions, blocks), told)
        self.chosen[layer.layer_id] = Selection(positions, blocks)
        self.used[layer.layer_id] = self.chosen[layer.layer_id] if told is None else told
        if told is not None:
            allowed = (2 * judge.error + 0.01) * check.entries
            if check.differing > allowed:
                share = f"{check.differing} of {check.entries} entries differ, {allowed:.0f} may"
                check.faults.append(f"layer {layer.layer_id}: {share}")
            self.checks.append(check)

    def _choose_rows(
        self,
        layer: LayerTopology,
        rows: Tensor,
        judge: _Judge,
        lists: tuple[Tensor, Tensor | None],
        told: Selection | None,
    ) -> None:
        cfg, (positions, blocks) = self.cfg, lists
        visible = torch.div(rows + 1, layer.ratio, rounding_mode="floor")
        entries = len(judge.scorer.keys)
        scores = judge.scorer.scores(rows)
        scores = scores.masked_fill(torch.arange(entries) >= visible[:, None], -torch.inf)
        if layer.consumes_candidates:
            source = self.used[cfg.candidate_source_layer_id].candidates
            assert source is not None
            kept = _membership(source[rows], -(-entries // cfg.candidate_block_size))
            inside = kept.repeat_interleave(cfg.candidate_block_size, dim=1)[:, :entries]
            inside |= (visible <= cfg.index_topk)[:, None]
            scores = scores.masked_fill(~inside, -torch.inf)
        positions[rows] = _best(scores, cfg.index_topk)
        if told is not None:
            judge.compare(rows, scores, positions[rows], told.positions[rows])
        if blocks is None:
            return
        best, members = _block_best(scores, cfg.candidate_block_size)
        newest = torch.div(visible - 1, cfg.candidate_block_size, rounding_mode="floor")
        pinned = (torch.arange(best.shape[1]) == newest[:, None]) & (visible > 0)[:, None]
        best = best.masked_fill(pinned, torch.inf)
        publishes = (visible > cfg.index_topk)[:, None]
        blocks[rows] = torch.where(publishes, _best(best, blocks.shape[1]), -1)
        if told is not None and told.candidates is not None:
            judge.compare(rows, best, blocks[rows], told.candidates[rows], members)


@dataclass(frozen=True, slots=True)
class _Judge:
    """Verifies told lists against scores of its own."""

    scorer: _Scorer
    error: float  # relative error of decoded index queries and keys
    check: SelectionCheck

    def compare(
        self,
        rows: Tensor,
        scores: Tensor,  # float32 [rows, columns], -inf = not to be chosen
        own: Tensor,  # int32 [rows, K] the lists chosen from the scores
        told: Tensor,  # int32 [rows, K]
        members: Tensor | None = None,  # int64 [rows, columns] entry behind a column's score
    ) -> None:
        """Add one chunk of rows to the check."""
        columns = scores.shape[1]
        counts = (own >= 0).sum(1)
        mine, theirs = _membership(own, columns), _membership(told, columns)
        exact = _is_list(told, counts, columns) & (theirs.sum(1) == counts)
        choice = counts < (scores > -torch.inf).sum(1)
        self.check.entries += int(counts[choice].sum())
        for index in torch.nonzero((mine != theirs).any(1) | ~exact).flatten().tolist():
            row = int(rows[index])
            where = f"layer {self.check.layer_id}, position {row}"
            if not bool(exact[index]):
                self.check.faults.append(
                    f"{where}: not a list of {int(counts[index])} ascending visible entries"
                )
                continue
            differing = torch.nonzero(mine[index] != theirs[index]).flatten()
            self.check.differing += len(differing) // 2
            worst = self._distance(row, scores[index], mine[index], differing, members, index)
            self.check.worst = max(self.check.worst, worst)
            if not worst <= 1:
                self.check.faults.append(
                    f"{where}: an entry lies {worst:.2f} tolerances beyond the cut"
                )

    def _distance(
        self,
        row: int,
        scores: Tensor,
        mine: Tensor,
        differing: Tensor,
        members: Tensor | None,
        index: int,
    ) -> float:
        """Largest |score - cut| of the differing columns, in tolerances."""
        cut = int(torch.where(mine, scores, torch.inf).argmin())
        columns = torch.cat([differing, torch.tensor([cut])])
        entries = columns if members is None else members[index][columns]
        sigma, code = self.scorer.reach(row, entries, self.error)
        tolerance = CUT_SIGMAS * torch.hypot(sigma[:-1], sigma[-1])
        tolerance += torch.maximum(code[:-1], code[-1])
        distance = (scores[differing] - scores[cut]).abs()
        return float((distance / tolerance).max())


def _membership(lists: Tensor, columns: int) -> Tensor:
    """Bool [rows, columns] from int32 lists; entries out of range are left out."""
    valid = (lists >= 0) & (lists < columns)
    mask = torch.zeros(len(lists), columns + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(valid, lists, columns).long(), torch.ones_like(valid))
    return mask[:, :columns]


def _is_list(lists: Tensor, counts: Tensor, columns: int) -> Tensor:
    """Bool [rows]: `counts` ascending entries below `columns`, then only -1."""
    inside = torch.arange(lists.shape[1]) < counts[:, None]
    steps = (lists[:, 1:] > lists[:, :-1]) | ~inside[:, 1:]
    fits = torch.where(inside, (lists >= 0) & (lists < columns), lists == -1)
    return fits.all(1) & steps.all(1)


def _best(scores: Tensor, count: int) -> Tensor:
    """int32 [rows, count]: columns of the best scores, ascending, -inf never, -1 suffix."""
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    never = scores.gather(1, order) == -torch.inf
    order = order.masked_fill(never, scores.shape[1]).sort(dim=1).values
    order = order.masked_fill(order == scores.shape[1], -1)
    return torch.nn.functional.pad(order, (0, count - order.shape[1]), value=-1).to(torch.int32)


def _block_best(scores: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Best score of each block, float32 [rows, blocks], and the entry that has it."""
    missing = -scores.shape[1] % block
    padded = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    best, offset = padded.view(len(scores), -1, block).max(dim=2)
    return best, offset + torch.arange(best.shape[1]) * block

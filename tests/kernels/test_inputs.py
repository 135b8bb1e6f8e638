"""What made inputs promise: ids at their edges, poison where nothing may look, the same values for the same seed."""

from __future__ import annotations

import pytest
import torch

from day0_kernels import registry
from day0_kernels.comparison import Mismatch, compare, judge, judge_backend, run, same_bits
from day0_kernels.inputs import make_inputs
from day0_kernels.spec import Case, Fill, Operator, Role, Tolerance, size_of

OPERATORS = {operator.name: operator for operator in registry.operators()}
POOLING = Case(
    "p", {"D": 8, "P": 4, "states": 5, "num_blocks": 9, "block_size": 16}, (20, 5), (0, 18), {"block_size": 16}
)


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_over_its_cases_every_id_meets_first_last_and_padding(name: str) -> None:
    operator = OPERATORS[name]
    for spec in operator.tensors:
        if spec.fill not in (Fill.BLOCK_TABLE, Fill.STATE_SLOTS, Fill.SLOT_MAPPING, Fill.TOPK_INDICES):
            continue
        seen: set[str] = set()
        for case in operator.cases:
            for seed in (0, 1):
                ids = make_inputs(operator, case, seed=seed).tensors[spec.name]
                sizes = case.sizes
                last = {
                    Fill.BLOCK_TABLE: sizes.get("num_blocks", 0) - 1,
                    Fill.STATE_SLOTS: sizes.get("states", 0) - 1,
                    Fill.SLOT_MAPPING: sizes.get("num_blocks", 0) * sizes.get("block_size", 0) - 1,
                    Fill.TOPK_INDICES: max((s + n for s, n in zip(case.start_positions, case.new_tokens, strict=True)))
                    - 1,
                }[spec.fill]
                assert int(ids.min()) >= -1 if ids.numel() else True
                assert int(ids.max()) <= last if ids.numel() else True
                seen |= {
                    word
                    for word, value in (("first", 0), ("last", last), ("padding", -1))
                    if bool((ids == value).any())
                }
        assert seen == {"first", "last", "padding"}, spec.name


@pytest.mark.parametrize("seed", [0, 1])
def test_one_block_is_the_first_or_the_last(seed: int) -> None:
    case = OPERATORS["index_pool"].cases[0]
    inputs = make_inputs(OPERATORS["index_pool"], case, seed=seed)
    assert int(inputs.tensors["block_table"][0, 0]) == (0 if seed == 0 else case.sizes["num_blocks"] - 1)
    assert int(inputs.tensors["state_slots"][0]) == (0 if seed == 0 else case.sizes["states"] - 1)


def test_a_cache_holds_poison_outside_its_sequences() -> None:
    operator = OPERATORS["index_pool"]
    tensors = make_inputs(operator, POOLING).tensors
    assert int((~tensors["pool_cache"].isnan().any(1)).sum()) == 18 // 4
    held = ~tensors["tail"].isnan().any(-1).any(-1)
    assert held.sum(1).tolist() == [2 if slot == int(tensors["state_slots"][1]) else 0 for slot in range(5)]
    reader = OPERATORS["index_select_prefill"]
    case = next(case for case in reader.cases if case.name == "packed")
    pools = make_inputs(reader, case).tensors["pool_cache"]
    ends = [start + new for start, new in zip(case.start_positions, case.new_tokens, strict=True)]
    assert int((~pools.isnan().any(1)).sum()) == sum(end // 4 for end in ends)


def test_the_seed_decides_everything() -> None:
    operator = OPERATORS["gated_delta_prefill"]
    first, again, other = (make_inputs(operator, operator.cases[3], seed=seed).tensors for seed in (5, 5, 6))
    assert all(same_bits(first[name], again[name]) for name in first)
    assert not same_bits(first["q"], other["q"])
    gates = first["g"]
    assert float(gates.max()) == 0.0
    assert float(gates.min()) == -5.0


def test_a_case_that_does_not_fit_is_refused() -> None:
    dims = dict(POOLING.dims)
    with pytest.raises(ValueError, match="case p needs 4 blocks, num_blocks is 3"):
        make_inputs(OPERATORS["index_pool"], Case("p", dims | {"num_blocks": 3}, (20, 5), (0, 18), POOLING.scalars))
    with pytest.raises(ValueError, match="case p needs 2 state slots, states is 1"):
        make_inputs(OPERATORS["index_pool"], Case("p", dims | {"states": 1}, (20, 5), (0, 18), POOLING.scalars))


def test_shape_expressions() -> None:
    assert size_of("(2 + M) * M", {"M": 4}) == 24
    assert size_of("num_blocks * block_size // P", {"num_blocks": 3, "block_size": 16, "P": 4}) == 12
    with pytest.raises(KeyError, match=r"names \['Q'\], known are \['M'\]"):
        size_of("Q * M", {"M": 4})


# The comparison itself must be able to say no.

TOLERANCE = Tolerance({"float32": 1e-3}, {"float32": 1e-2})


def test_compare_names_the_worst_element() -> None:
    want = torch.tensor([[1.0, 2.0], [100.0, 4.0]])
    got = want + torch.tensor([[0.0, 0.02], [0.9, 0.06]])
    found = compare("out", got, want, TOLERANCE)
    assert not found.within
    assert found.index == (1, 1)
    assert found.largest_difference == pytest.approx(0.9, abs=1e-4)
    assert found.excess == pytest.approx(0.06 - 0.04 - 1e-3, abs=1e-4)
    assert compare("out", want * 1.005, want, TOLERANCE).within


@pytest.mark.parametrize(
    ("got", "want", "within"),
    [
        (torch.nan, 1.0, False),
        (1.0, torch.nan, False),
        (torch.nan, torch.nan, True),
        (torch.inf, 1.0, False),
        (1.0, torch.inf, False),
        (torch.inf, torch.inf, True),
        (-torch.inf, torch.inf, False),
    ],
)
def test_compare_has_no_hole_for_nan_and_infinity(got: float, want: float, within: bool) -> None:
    assert compare("out", torch.tensor([0.0, got]), torch.tensor([0.0, want]), TOLERANCE).within is within


def test_ids_must_be_equal() -> None:
    assert not compare("ids", torch.tensor([1, 2]), torch.tensor([1, 3]), TOLERANCE).within
    with pytest.raises(Mismatch, match=r"out: shape \(2,\), want \(1, 2\)"):
        compare("out", torch.zeros(2), torch.zeros(1, 2), TOLERANCE)


def test_same_bits_is_about_bits() -> None:
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert same_bits(torch.zeros(0, 3), torch.zeros(0, 3))


def _kv(operator: Operator) -> Case:
    return next(case for case in operator.cases if case.name == "packed")


def test_a_backend_that_strays_is_caught() -> None:
    operator = OPERATORS["kv_store"]
    inputs, reference = make_inputs(operator, _kv(operator)), registry.resolve("kv_store", "cpu", torch.float32).fn

    def writes_padding(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        cache[slot_mapping.long()] = rows

    def forgets_slot_zero(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        kept = slot_mapping > 0
        cache[slot_mapping[kept].long()] = rows[kept]

    def changes_its_input(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        reference(rows, cache, slot_mapping)
        rows.zero_()

    def is_random(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        reference(rows + torch.rand(()), cache, slot_mapping)

    def returns_something(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        return cache

    wanted = run(operator, reference, inputs)
    for broken in (writes_padding, forgets_slot_zero):
        with pytest.raises(Mismatch, match=r"kv_store: cache\["):
            judge(operator, run(operator, broken, inputs), wanted)
    for broken, message in (
        (changes_its_input, "changed its input rows"),
        (is_random, "cache has other bits in a second run"),
        (returns_something, "returned 1 tensors, the spec has 0"),
    ):
        with pytest.raises(Mismatch, match=message):
            judge_backend(operator, broken, reference, inputs)
    judge_backend(operator, reference, reference, inputs)


def test_caches_of_the_specs_are_marked() -> None:
    cached = {
        name: [tensor.name for tensor in operator.cached] for name, operator in OPERATORS.items() if operator.cached
    }
    assert cached == {
        "kv_store": ["cache"],
        "index_pool": ["tail", "pool_cache"],
        "short_conv_prefill": ["conv_state"],
        "short_conv_decode": ["conv_state"],
        "gated_delta_prefill": ["state"],
        "gated_delta_decode": ["state"],
        "mxfp4_to_fp8": ["fp8"],
        "latent_store_fp8": ["latent_cache"],
        "index_key_store_fp8": ["key_cache"],
        "latent_and_key_store_fp8": ["latent_cache", "key_cache"],
    }
    assert Role.CACHE.value == "cache"


def test_expert_ids_are_the_first_the_last_and_those_of_no_expert() -> None:
    seen: set[str] = set()
    for case in OPERATORS["permute_rows"].cases:
        for seed in (0, 1):
            ids = make_inputs(OPERATORS["permute_rows"], case, seed=seed).tensors["topk_ids"].flatten().tolist()
            experts = case.sizes["E"]
            assert all(-1 <= i <= experts for i in ids)
            named = {0: "first", experts - 1: "last", -1: "below", experts: "beyond"}
            seen |= {named[i] for i in ids if i in named}
    assert seen == {"first", "last", "below", "beyond"}


def test_row_places_are_distinct_with_the_first_the_last_and_none() -> None:
    seen: set[int] = set()
    for case in OPERATORS["unpermute_rows"].cases:
        for seed in (0, 1):
            places = make_inputs(OPERATORS["unpermute_rows"], case, seed=seed).tensors["places"].flatten()
            held = places[places >= 0]
            assert len(held.unique()) == len(held) and (places < len(places)).all()
            seen |= {int(i) for i in places.tolist() if i == -1} | {0 for i in held.tolist() if i == 0}
            seen |= {1 for i in held.tolist() if i == len(places) - 1 > 0}
    assert seen == {-1, 0, 1}

"""Reading programs written by hand: loops, calls, asynchronous and tuple forms, metadata of both kinds."""

from __future__ import annotations

import pytest

from shardwise.partition.mesh import MeshSpec
from shardwise.planner.collectives import Collective
from shardwise.planner.hlo import parse_instruction, parse_module
from shardwise.planner.partitioned import PartitionedModule

MESH = MeshSpec(1, 2, 2)
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
OVER_TP = "channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true"


def read(body: str, before: str = "") -> list[Collective]:
    """Collectives of a program whose entry has these lines."""
    return module(body, before).collectives(MESH)


def module(body: str, before: str = "") -> PartitionedModule:
    text = f"HloModule test\n{ADD}{before}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return PartitionedModule.from_text(text)


def loop(
    name: str, inner: str, trips: int, *, start: int = 0, step: int = 1, carried: str = "f32[8]{0}"
) -> str:
    """Condition and body of a counted loop over one array."""
    return f"""
%{name}_cond (p: (s32[], {carried})) -> pred[] {{
  %p = (s32[], {carried}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant({start + trips * step})
  ROOT %lt = pred[] compare(%i, %n), direction={"LT" if step > 0 else "GT"}
}}

%{name}_body (p: (s32[], {carried})) -> (s32[], {carried}) {{
  %p = (s32[], {carried}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = {carried} get-tuple-element(%p), index=1
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
{inner}
  ROOT %t = (s32[], {carried}) tuple(%next, %y)
}}
"""


def run_loop(name: str, start: int = 0) -> str:
    return f"""
  %start_{name} = s32[] constant({start})
  %in_{name} = (s32[], f32[8]) tuple(%start_{name}, %x)
  %w_{name} = (s32[], f32[8]) while(%in_{name}), condition=%{name}_cond, body=%{name}_body
"""


REDUCE = f"  %y = f32[8] all-reduce(%x), {OVER_TP}, to_apply=%add"
ARGUMENT = "  %x = f32[8] parameter(0)\n"


def test_a_line_is_taken_apart() -> None:
    i = parse_instruction(
        "  ROOT %ar.1 = (bf16[2,3]{1,0:T(8,128)(2,1)}, /*index=1*/s32[]) all-reduce(bf16[2,3]{1,0} %a, %b.2),"
        ' channel_id=3, replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(f)/a,b={(" '
        'source_file="/m.py" source_line=7}'
    )
    assert i is not None
    assert (i.name, i.op, i.operands, i.is_root) == ("ar.1", "all-reduce", ("a", "b.2"), True)
    assert [(s.dtype, s.dims, s.bytes) for s in i.shapes] == [("bf16", (2, 3), 12), ("s32", (), 4)]
    assert i.attributes["replica_groups"] == "{{0,1}}"
    assert i.called("to_apply") == ["add"]
    assert i.op_name == "jit(f)/a,b={("


@pytest.mark.parametrize(
    ("dtype", "name", "size"),
    [
        ("f32", "float32", 4), ("bf16", "bfloat16", 2), ("pred", "bool", 1), ("s32", "int32", 4),
        ("u8", "uint8", 1), ("f8e4m3fn", "float8_e4m3fn", 1), ("f64", "float64", 8), ("c64", "complex64", 8),
    ],
)  # fmt: skip
def test_dtypes_have_their_jax_names_and_sizes(dtype: str, name: str, size: int) -> None:
    instruction = parse_instruction(f"%x = {dtype}[10]{{0}} parameter(0)")
    assert instruction is not None
    assert (instruction.shapes[0].jax_dtype, instruction.bytes) == (name, 10 * size)


def test_four_bit_numbers_share_bytes() -> None:
    instruction = parse_instruction("%x = s4[3]{0} parameter(0)")
    assert instruction is not None
    assert instruction.bytes == 2


def test_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="not an HLO module"):
        parse_module("nothing here")


def test_payload_is_what_each_operation_defines() -> None:
    body = f"""
  %x = f32[8] parameter(0)
  %ag = f32[16] all-gather(%x), {OVER_TP}, dimensions={{0}}
  %rs = f32[4] reduce-scatter(%x), {OVER_TP}, dimensions={{0}}, to_apply=%add
  %ar = f32[8] all-reduce(%x), {OVER_TP}, to_apply=%add
  %aa = f32[8] all-to-all(%x), channel_id=1, replica_groups={{{{0,2}},{{1,3}}}}, dimensions={{0}}
  %s = f32[4] slice(%x), slice={{[0:4]}}
  %at = (f32[4], f32[4]) all-to-all(%s, %s), channel_id=1, replica_groups={{{{0,1}},{{2,3}}}}
  ROOT %cp = f32[8] collective-permute(%x), channel_id=1, source_target_pairs={{{{0,2}},{{2,0}}}}
"""
    found = [(c.op, c.axes, c.payload) for c in read(body)]
    assert found == [
        ("all-gather", ("tp",), 64), ("reduce-scatter", ("tp",), 32), ("all-reduce", ("tp",), 32),
        ("all-to-all", ("fsdp",), 32), ("all-to-all", ("tp",), 32), ("collective-permute", ("fsdp",), 32),
    ]  # fmt: skip


def test_asynchronous_forms_count_once_and_tuples_sum_their_parts() -> None:
    wrapped = f"""
%wrapped (w: f32[8]) -> f32[4] {{
  %w = f32[8] parameter(0)
  ROOT %rs = f32[4] reduce-scatter(%w), {OVER_TP}, dimensions={{0}}, to_apply=%add
}}
"""
    body = f"""
  %x = f32[8] parameter(0)
  %h = bf16[2] constant({{1, 2}})
  %g = (f32[8], f32[16]) all-gather-start(%x), {OVER_TP}, dimensions={{0}}
  %gd = f32[16] all-gather-done(%g)
  %r = (f32[8], bf16[2]) all-reduce-start(%x, %h), {OVER_TP}, to_apply=%add
  %rd = (f32[8], bf16[2]) all-reduce-done(%r)
  %p = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%x), source_target_pairs={{{{0,1}},{{1,0}}}}
  %pd = f32[8] collective-permute-done(%p)
  %s = ((f32[8]), f32[4]) async-start(%x), calls=%wrapped
  ROOT %sd = f32[4] async-done(%s), calls=%wrapped
"""
    found = [(c.op, c.payload, c.count) for c in read(body, wrapped)]
    assert found == [
        ("all-gather", 64, 1),
        ("all-reduce", 36, 1),
        ("collective-permute", 32, 1),
        ("reduce-scatter", 32, 1),
    ]


@pytest.mark.parametrize(
    "groups",
    [
        "{{0},{1},{2},{3}}",
        "[4,1]<=[4]",
        "mesh['a'=4,'b'=1] {'b'}",
    ],
)
def test_groups_of_one_device_do_not_count(groups: str) -> None:
    line = "  ROOT %r = f32[8] all-reduce(%x), channel_id=1, use_global_device_ids=true"
    assert read(f"{ARGUMENT}{line}, replica_groups={groups}, to_apply=%add") == []


def test_without_a_channel_groups_are_of_replicas_of_which_there_is_one() -> None:
    assert read(f"{ARGUMENT}  ROOT %r = f32[8] all-reduce(%x), replica_groups={{}}, to_apply=%add") == []


def test_a_device_order_of_its_own_belongs_to_the_groups() -> None:
    groups = "mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}"
    line = f"channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    assert read(f"{ARGUMENT}  ROOT %r = f32[8] all-reduce(%x), {line}")[0].axes == ("fsdp",)


def test_groups_that_are_no_axes_are_listed_in_the_note() -> None:
    line = "channel_id=1, replica_groups={{0,3},{1,2}}, use_global_device_ids=true, to_apply=%add"
    (c,) = read(f"{ARGUMENT}  ROOT %r = f32[8] all-reduce(%x), {line}")
    assert c.axes == ()
    assert "[[0, 3], [1, 2]]" in c.note


@pytest.mark.parametrize(("start", "step", "trips"), [(0, 1, 6), (3, 2, 5), (10, -2, 5), (0, 1, 0)])
def test_a_counted_loop_runs_from_its_start_to_its_bound(start: int, step: int, trips: int) -> None:
    found = read(ARGUMENT + run_loop("l", start), loop("l", REDUCE, trips, start=start, step=step))
    assert [c.count for c in found] == ([trips] if trips else [])
    assert all(c.in_loop and not c.note for c in found)


def test_nested_loops_multiply() -> None:
    inner = run_loop("inner") + "  %y = f32[8] get-tuple-element(%w_inner), index=1"
    before = loop("inner", REDUCE, 3) + loop("outer", inner, 5)
    assert [c.count for c in read(ARGUMENT + run_loop("outer"), before)] == [15]


def test_a_loop_called_from_two_places_runs_as_often_as_both_together() -> None:
    helper = f"""
%helper (x: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
  {REDUCE.replace("%y", "ROOT %y")}
}}
"""
    inner = "  %y = f32[8] call(%x), to_apply=%helper"
    body = ARGUMENT + "  %once = f32[8] call(%x), to_apply=%helper\n" + run_loop("l")
    found = read(body, helper + loop("l", inner, 4))
    assert sorted((c.count, c.in_loop) for c in found) == [(1, False), (4, True)]
    calls = "  %a = f32[8] call(%x), to_apply=%helper\n  %b = f32[8] call(%a), to_apply=%helper"
    assert [c.count for c in read(ARGUMENT + calls, helper)] == [2]


def test_the_compilers_own_trip_count_comes_first() -> None:
    body = ARGUMENT + run_loop("l").rstrip() + ', backend_config={"known_trip_count":{"n":"7"}}'
    assert [c.count for c in read(body, loop("l", REDUCE, 4))] == [7]


def test_elements_of_tuples_may_be_written_with_a_number_sign() -> None:
    before = """
%cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %n = s32[] constant(4)
  ROOT %lt = pred[] compare(%p#0, %n), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %one = s32[] constant(1)
  %next = s32[] add(%p#0, %one)
  %y = f32[8] all-reduce(%p#1), channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true
  ROOT %t = (s32[], f32[8]) tuple(%next, %y)
}
"""
    body = ARGUMENT + run_loop("l").replace("%l_", "%")
    assert [(c.count, c.payload) for c in read(body, before)] == [(4, 32)]


def test_a_bound_that_the_loop_carries_unchanged_is_found_where_the_loop_starts() -> None:
    before = """
%cond (p: (s32[], s32[])) -> pred[] {
  %p = (s32[], s32[]) parameter(0)
  ROOT %gt = pred[] compare(%p#1, %p#0), direction=GT
}

%body (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %one = s32[] constant(1)
  %next = s32[] add(%one, %p#0)
  %y = s32[] all-reduce(%p#1), channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true
  ROOT %t = (s32[], s32[]) tuple(%next, %p#1)
}
"""
    body = """
  %x = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %n = s32[] constant(9)
  %in = (s32[], s32[]) tuple(%zero, %n)
  ROOT %w = (s32[], s32[]) while(%in), condition=%cond, body=%body
"""
    assert [c.count for c in read(body, before)] == [9]


def test_a_loop_of_unknown_length_counts_once_and_says_so() -> None:
    before = loop("l", REDUCE, 4).replace("%n = s32[] constant(4)", "%n = s32[] custom-call(%i)")
    (c,) = read(ARGUMENT + run_loop("l"), before)
    assert (c.count, c.in_loop) == (1, True)
    assert "loop of unknown length" in c.note


def test_both_branches_of_a_condition_count_with_a_note() -> None:
    before = "".join(
        f"\n%b{n} (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n"
        f"  {REDUCE.replace('%y', 'ROOT %y')}\n}}\n"
        for n in (0, 1)
    )
    body = f"{ARGUMENT}  %i = s32[] constant(0)\n  ROOT %c = f32[8] conditional(%i, %x, %x), " + (
        "branch_computations={%b0, %b1}"
    )
    found = read(body, before)
    assert len(found) == 2
    assert all("one branch of a condition" in c.note for c in found)


def sliced(between: str, table: str = "{0, 4, 0, 4}", more: str = "") -> str:
    return f"""
  %x = f32[8] parameter(0)
  {REDUCE}
{between}
  %table = s32[4] constant({table})
  %id = u32[] partition-id()
  %start = s32[1] dynamic-slice(%table, %id), dynamic_slice_sizes={{1}}
  %offset = s32[] reshape(%start)
  %cut = bf16[4] dynamic-slice(%z, %offset), dynamic_slice_sizes={{4}}
{more}
"""


CAST = "  %z = bf16[8] convert(%y)"


def test_an_all_reduce_of_which_each_device_keeps_its_slice_is_a_reduce_scatter() -> None:
    (c,) = read(sliced(CAST))
    assert (c.op, c.axes, c.dtype, c.payload) == ("reduce-scatter", ("tp",), "float32", 32)
    assert c.note == "compiled as all-reduce + slice"


def test_a_computed_start_is_followed() -> None:
    body = sliced(CAST).replace(
        "%offset = s32[] reshape(%start)",
        "%two = u32[] constant(2)\n  %place = u32[] remainder(%id, %two)\n  %four = u32[] constant(4)\n"
        "  %offset = u32[] multiply(%place, %four)",
    )
    assert [c.op for c in read(body)] == ["reduce-scatter"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(sliced(CAST, more="  %other = bf16[8] negate(%z)"), id="another use"),
        pytest.param(sliced(CAST, table="{0, 0, 4, 4}"), id="slice along another axis"),
        pytest.param(sliced(CAST, table="{0, 0, 0, 0}"), id="the same slice everywhere"),
        pytest.param(sliced("  %z = bf16[8] custom-call(%y)"), id="something in between"),
        pytest.param(
            sliced(CAST).replace("%cut = bf16[4]", "%cut = bf16[2]").replace("sizes={4}", "sizes={2}"),
            id="a slice that leaves elements to nobody",
        ),
        pytest.param(sliced(CAST, table="{...}"), id="a table left out of the text"),
    ],
)
def test_any_other_use_leaves_it_an_all_reduce(body: str) -> None:
    assert [c.op for c in read(body)] == ["all-reduce"]


def test_a_slice_along_some_of_its_axes_splits_it() -> None:
    body = sliced(CAST).replace("{{0,1},{2,3}}", "{{0,1,2,3}}")
    scatter, rest = read(body)
    assert (scatter.op, scatter.axes, scatter.payload) == ("reduce-scatter", ("tp",), 32)
    assert (rest.op, rest.axes, rest.payload) == ("all-reduce", ("fsdp",), 16)
    assert "all-reduce over fsdp, tp + slice" in rest.note


def test_products_count_contracted_and_batch_dims_and_trips() -> None:
    dot = (
        "  %a = f32[2,3,4] constant({...})\n  %b = f32[2,4,5] constant({...})\n"
        "  %d = f32[2,3,5] dot(%a, %b), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2},"
        " rhs_contracting_dims={1}\n"
    )
    flops = module(ARGUMENT + dot + run_loop("l"), loop("l", dot + REDUCE, 3)).flops()
    assert (flops.outside, flops.in_loops, flops.total) == (240, 720, 960)


def test_buffers_are_what_instructions_make() -> None:
    body = (
        ARGUMENT
        + "  %two = (f32[8], bf16[2]) custom-call(%x)\n  %e = f32[8] get-tuple-element(%two), index=0\n"
    )
    buffers = module(body + run_loop("l"), loop("l", REDUCE, 2)).buffers()
    made = [(b.instruction.name, b.bytes, b.shape, b.dtype, b.in_loop) for b in buffers if b.shape]
    assert made == [
        ("two", 32, (8,), "float32", False),
        ("two", 4, (2,), "bfloat16", False),
        ("y", 32, (8,), "float32", True),
    ]


TABLES = """
FileNames
1 "/home/me/model.py"
2 "/site-packages/jax/core.py"

FunctionNames
1 "outer"
2 "Layer.<locals>.inner"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=1 function_name_id=2 line=20 end_line=20 column=1 end_column=2}

StackFrames
"""


@pytest.mark.parametrize(
    "frames",
    [
        "1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}",
        "1 {file_location_id=1 parent_frame_id=0}\n2 {file_location_id=2 parent_frame_id=1}",
    ],
)
def test_stacks_are_read_from_tables_with_parents_printed_either_way(frames: str) -> None:
    text = f"HloModule m\n{TABLES}{frames}\n\n\nENTRY %main (x: f32[]) -> f32[] {{\n"
    line = '  ROOT %x = f32[] parameter(0), metadata={op_name="p" stack_frame_id=2}\n}\n'
    program = parse_module(text + line)
    found = program.frames(program.computations["main"].root)
    assert [(f.file, f.line, f.function) for f in found] == [
        ("/home/me/model.py", 20, "Layer.<locals>.inner"),
        ("/home/me/model.py", 10, "outer"),
    ]


def test_the_older_form_of_metadata_gives_one_line() -> None:
    line = REDUCE + ', metadata={op_name="jit(f)/psum" source_file="/home/me/model.py" source_line=7}'
    assert [c.cause for c in read(ARGUMENT + line)] == ["psum at model.py:7"]


def test_phases_follow_the_names_that_jax_gives() -> None:
    names = ["jit(f)/jvp()/dot", "jit(f)/transpose(jvp())/dot", "jit(f)/add"]
    lines = [
        REDUCE.replace("%y", f"%y{n}") + f', metadata={{op_name="{name}"}}' for n, name in enumerate(names)
    ]
    assert [c.phase for c in read(ARGUMENT + "\n".join(lines))] == ["forward", "backward", "update"]
    assert [c.phase for c in read(ARGUMENT + lines[2])] == ["forward"]

"""The first of two doors to private torch; the other is moefuse/capture/dynamo. All is guarded by tests, and works from torch 2.11 on.

What the rest of moefuse uses is listed here, room by room; it is called as ``_torch_private.name``, so that tests can put something else in
its place. torch's compiler modules are imported inside the functions: importing moefuse must stay as cheap as importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moefuse._torch_private import failures as failures
from moefuse._torch_private.autograd import (
    forward_level as forward_level,
    guard_forward_level as guard_forward_level,
    has_tangent as has_tangent,
    hooks_of_gradients as hooks_of_gradients,
    keeps_by_hooks as keeps_by_hooks,
    running_backward as running_backward,
    transform as transform,
    unless_transformed as unless_transformed,
    variables_of_backward as variables_of_backward,
    when_backward_ends as when_backward_ends,
)
from moefuse._torch_private.compilation import (
    RunningCall as RunningCall,
    Together as Together,
    Traced as Traced,
    at_each_call as at_each_call,
    before_torch_compile as before_torch_compile,
    call_of as call_of,
    called_from as called_from,
    compiled_code_is_stored as compiled_code_is_stored,
    compiler_of_call as compiler_of_call,
    compiles_callees as compiles_callees,
    composites_in_python as composites_in_python,
    count as count,
    frame_id as frame_id,
    given_fakes as given_fakes,
    guard_endings as guard_endings,
    in_compiled_call as in_compiled_call,
    inlined_only as inlined_only,
    is_torch_compile_call as is_torch_compile_call,
    kept_out as kept_out,
    name_backend as name_backend,
    running_call as running_call,
    sizes_of_the_run as sizes_of_the_run,
    source_name as source_name,
    torch_compile_call as torch_compile_call,
    trace_artifact as trace_artifact,
    traced as traced,
    unobserved as unobserved,
    unwrap_backend as unwrap_backend,
    when_functionalized as when_functionalized,
)
from moefuse._torch_private.cpp import (
    INTERFACE as INTERFACE,
    MAY_LACK as MAY_LACK,
    build_cpp as build_cpp,
    cpp_compiler as cpp_compiler,
    file_lock as file_lock,
    inductor_folder as inductor_folder,
    libtorch_functions as libtorch_functions,
    libtorch_interface as libtorch_interface,
)
from moefuse._torch_private.cuda import (
    current_device as current_device,
)
from moefuse._torch_private.custom_ops import (
    implementations as implementations,
    names_of_ops as names_of_ops,
)
from moefuse._torch_private.distributed import (
    NotForDDP as NotForDDP,
    again_for_ddp as again_for_ddp,
    coalesced as coalesced,
    computed_with as computed_with,
    local_part as local_part,
    not_for_ddp as not_for_ddp,
    sharded_again as sharded_again,
    sharded_over as sharded_over,
    symmetric_memory as symmetric_memory,
    symmetric_peers as symmetric_peers,
    symmetric_views as symmetric_views,
    timeout_of as timeout_of,
)
from moefuse._torch_private.dynamo_state import (
    TraceLog as TraceLog,
    any_size as any_size,
    borrowed_dynamo as borrowed_dynamo,
    broken_graphs as broken_graphs,
    compile_front as compile_front,
    compile_isolated as compile_isolated,
    epoch as epoch,
    guard_names as guard_names,
    not_compiled as not_compiled,
    reset_code as reset_code,
)
from moefuse._torch_private.errors import (
    FAKES_LOG as FAKES_LOG,
    asks_for_size as asks_for_size,
    beneath as beneath,
    breaks_the_graph as breaks_the_graph,
    compiler_failed as compiler_failed,
    depends_on_data as depends_on_data,
    dynamo_control_flow as dynamo_control_flow,
    ends_frame as ends_frame,
    graph_break as graph_break,
    surfacing as surfacing,
    tracing_stop as tracing_stop,
)
from moefuse._torch_private.floats import (
    has_floats as has_floats,
)
from moefuse._torch_private.inductor import (
    compile_fx as compile_fx,
    compile_region as compile_region,
    in_backward as in_backward,
    inductor_config as inductor_config,
    inductor_option_names as inductor_option_names,
    is_inductor_option as is_inductor_option,
    keep_what_is_mutated as keep_what_is_mutated,
    keeps_random_stream as keeps_random_stream,
    objects_last as objects_last,
    random_stream_of as random_stream_of,
    records_graphs as records_graphs,
    with_stamp as with_stamp,
)
from moefuse._torch_private.order import (
    communicates as communicates,
    keep_order as keep_order,
    never_dead as never_dead,
)
from moefuse._torch_private.tensors import (
    after_operations as after_operations,
    before_writes as before_writes,
    has_kernel as has_kernel,
    has_static_address as has_static_address,
    in_memory as in_memory,
    is_composite as is_composite,
    is_distributed as is_distributed,
    is_transformed as is_transformed,
    made_of_others as made_of_others,
    map_tensors as map_tensors,
    on_cpu as on_cpu,
    same_storage as same_storage,
    static_address as static_address,
    static_sizes as static_sizes,
    storage_key as storage_key,
    storages_of as storages_of,
    tensor_state as tensor_state,
    trying_on_fakes as trying_on_fakes,
)
from moefuse._torch_private.types import (
    BatchNorm as BatchNorm,
    CompiledFn as CompiledFn,
    DisableTorchFunctionSubclass as DisableTorchFunctionSubclass,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
    HigherOrderOperator as HigherOrderOperator,
    OpOverload as OpOverload,
    OpOverloadPacket as OpOverloadPacket,
    below_autograd as below_autograd,
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_unflatten as tree_unflatten,
)
from moefuse._torch_private.watched import (
    OF_TORCH as OF_TORCH,
    inner_operations as inner_operations,
)

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass


def __getattr__(name: str) -> object:
    # Inductor's base class for graph passes with a cache key; as an attribute, so that it can be imported and still costs nothing before.
    if name == "CustomGraphPass":
        from torch._inductor.custom_graph_pass import CustomGraphPass

        return CustomGraphPass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

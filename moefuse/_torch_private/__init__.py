"""The only door to private torch. Everything here is guarded by tests and works from torch 2.11 on.

What the rest of moefuse uses is listed here, room by room; it is called as ``_torch_private.name``, so that tests can put something else in
its place. torch's compiler modules are imported inside the functions: importing moefuse must stay as cheap as importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moefuse._torch_private import failures as failures
from moefuse._torch_private.autograd import (
    forward_level as forward_level,
)
from moefuse._torch_private.autograd import (
    guard_forward_level as guard_forward_level,
)
from moefuse._torch_private.autograd import (
    has_tangent as has_tangent,
)
from moefuse._torch_private.autograd import (
    hooks_of_gradients as hooks_of_gradients,
)
from moefuse._torch_private.autograd import (
    keeps_by_hooks as keeps_by_hooks,
)
from moefuse._torch_private.autograd import (
    running_backward as running_backward,
)
from moefuse._torch_private.autograd import (
    transform as transform,
)
from moefuse._torch_private.autograd import (
    unless_transformed as unless_transformed,
)
from moefuse._torch_private.autograd import (
    variables_of_backward as variables_of_backward,
)
from moefuse._torch_private.autograd import (
    when_backward_ends as when_backward_ends,
)
from moefuse._torch_private.compilation import (
    RunningCall as RunningCall,
)
from moefuse._torch_private.compilation import (
    Traced as Traced,
)
from moefuse._torch_private.compilation import (
    at_each_call as at_each_call,
)
from moefuse._torch_private.compilation import (
    before_torch_compile as before_torch_compile,
)
from moefuse._torch_private.compilation import (
    called_from as called_from,
)
from moefuse._torch_private.compilation import (
    compiled_code_is_stored as compiled_code_is_stored,
)
from moefuse._torch_private.compilation import (
    compiler_of_call as compiler_of_call,
)
from moefuse._torch_private.compilation import (
    compiles_callees as compiles_callees,
)
from moefuse._torch_private.compilation import (
    count as count,
)
from moefuse._torch_private.compilation import (
    frame_id as frame_id,
)
from moefuse._torch_private.compilation import (
    given_fakes as given_fakes,
)
from moefuse._torch_private.compilation import (
    guard_endings as guard_endings,
)
from moefuse._torch_private.compilation import (
    in_compiled_call as in_compiled_call,
)
from moefuse._torch_private.compilation import (
    inlined_only as inlined_only,
)
from moefuse._torch_private.compilation import (
    is_torch_compile_call as is_torch_compile_call,
)
from moefuse._torch_private.compilation import (
    kept_out as kept_out,
)
from moefuse._torch_private.compilation import (
    running_call as running_call,
)
from moefuse._torch_private.compilation import (
    sizes_of_the_run as sizes_of_the_run,
)
from moefuse._torch_private.compilation import (
    source_name as source_name,
)
from moefuse._torch_private.compilation import (
    torch_compile_call as torch_compile_call,
)
from moefuse._torch_private.compilation import (
    trace_artifact as trace_artifact,
)
from moefuse._torch_private.compilation import (
    traced as traced,
)
from moefuse._torch_private.compilation import (
    unobserved as unobserved,
)
from moefuse._torch_private.compilation import (
    unwrap_backend as unwrap_backend,
)
from moefuse._torch_private.compilation import (
    when_functionalized as when_functionalized,
)
from moefuse._torch_private.cpp import (
    INTERFACE as INTERFACE,
)
from moefuse._torch_private.cpp import (
    MAY_LACK as MAY_LACK,
)
from moefuse._torch_private.cpp import (
    build_cpp as build_cpp,
)
from moefuse._torch_private.cpp import (
    cpp_compiler as cpp_compiler,
)
from moefuse._torch_private.cpp import (
    file_lock as file_lock,
)
from moefuse._torch_private.cpp import (
    libtorch_functions as libtorch_functions,
)
from moefuse._torch_private.cpp import (
    libtorch_interface as libtorch_interface,
)
from moefuse._torch_private.cuda import (
    current_device as current_device,
)
from moefuse._torch_private.cuda import (
    empty_cuda as empty_cuda,
)
from moefuse._torch_private.cuda import (
    raw_stream as raw_stream,
)
from moefuse._torch_private.custom_ops import (
    implementations as implementations,
)
from moefuse._torch_private.distributed import (
    NotForDDP as NotForDDP,
)
from moefuse._torch_private.distributed import (
    again_for_ddp as again_for_ddp,
)
from moefuse._torch_private.distributed import (
    coalesced as coalesced,
)
from moefuse._torch_private.distributed import (
    computed_with as computed_with,
)
from moefuse._torch_private.distributed import (
    not_for_ddp as not_for_ddp,
)
from moefuse._torch_private.distributed import (
    sharded_over as sharded_over,
)
from moefuse._torch_private.distributed import (
    symmetric_memory as symmetric_memory,
)
from moefuse._torch_private.distributed import (
    symmetric_peers as symmetric_peers,
)
from moefuse._torch_private.distributed import (
    timeout_of as timeout_of,
)
from moefuse._torch_private.dynamo_state import (
    TraceLog as TraceLog,
)
from moefuse._torch_private.dynamo_state import (
    borrowed_dynamo as borrowed_dynamo,
)
from moefuse._torch_private.dynamo_state import (
    compile_front as compile_front,
)
from moefuse._torch_private.dynamo_state import (
    compile_isolated as compile_isolated,
)
from moefuse._torch_private.dynamo_state import (
    epoch as epoch,
)
from moefuse._torch_private.dynamo_state import (
    guard_names as guard_names,
)
from moefuse._torch_private.dynamo_state import (
    not_compiled as not_compiled,
)
from moefuse._torch_private.dynamo_state import (
    reset_code as reset_code,
)
from moefuse._torch_private.errors import (
    asks_for_size as asks_for_size,
)
from moefuse._torch_private.errors import (
    breaks_the_graph as breaks_the_graph,
)
from moefuse._torch_private.errors import (
    compiler_failed as compiler_failed,
)
from moefuse._torch_private.errors import (
    depends_on_data as depends_on_data,
)
from moefuse._torch_private.errors import (
    dynamo_control_flow as dynamo_control_flow,
)
from moefuse._torch_private.errors import (
    graph_break as graph_break,
)
from moefuse._torch_private.errors import (
    surfacing as surfacing,
)
from moefuse._torch_private.errors import (
    tracing_stop as tracing_stop,
)
from moefuse._torch_private.floats import (
    has_floats as has_floats,
)
from moefuse._torch_private.inductor import (
    compile_fx as compile_fx,
)
from moefuse._torch_private.inductor import (
    compile_region as compile_region,
)
from moefuse._torch_private.inductor import (
    inductor_config as inductor_config,
)
from moefuse._torch_private.inductor import (
    inductor_option_names as inductor_option_names,
)
from moefuse._torch_private.inductor import (
    is_inductor_option as is_inductor_option,
)
from moefuse._torch_private.inductor import (
    keep_what_is_mutated as keep_what_is_mutated,
)
from moefuse._torch_private.inductor import (
    keeps_random_stream as keeps_random_stream,
)
from moefuse._torch_private.inductor import (
    objects_last as objects_last,
)
from moefuse._torch_private.inductor import (
    random_stream_of as random_stream_of,
)
from moefuse._torch_private.inductor import (
    records_graphs as records_graphs,
)
from moefuse._torch_private.inductor import (
    with_stamp as with_stamp,
)
from moefuse._torch_private.order import (
    communicates as communicates,
)
from moefuse._torch_private.order import (
    keep_order as keep_order,
)
from moefuse._torch_private.order import (
    never_dead as never_dead,
)
from moefuse._torch_private.tensors import (
    after_operations as after_operations,
)
from moefuse._torch_private.tensors import (
    before_writes as before_writes,
)
from moefuse._torch_private.tensors import (
    has_kernel as has_kernel,
)
from moefuse._torch_private.tensors import (
    in_memory as in_memory,
)
from moefuse._torch_private.tensors import (
    is_composite as is_composite,
)
from moefuse._torch_private.tensors import (
    is_distributed as is_distributed,
)
from moefuse._torch_private.tensors import (
    is_transformed as is_transformed,
)
from moefuse._torch_private.tensors import (
    made_of_others as made_of_others,
)
from moefuse._torch_private.tensors import (
    map_tensors as map_tensors,
)
from moefuse._torch_private.tensors import (
    on_cpu as on_cpu,
)
from moefuse._torch_private.tensors import (
    same_storage as same_storage,
)
from moefuse._torch_private.tensors import (
    static_address as static_address,
)
from moefuse._torch_private.tensors import (
    storage_key as storage_key,
)
from moefuse._torch_private.tensors import (
    storages_of as storages_of,
)
from moefuse._torch_private.tensors import (
    tensor_state as tensor_state,
)
from moefuse._torch_private.tensors import (
    trying_on_fakes as trying_on_fakes,
)
from moefuse._torch_private.types import CompiledFn as CompiledFn
from moefuse._torch_private.watched import (
    OF_TORCH as OF_TORCH,
)
from moefuse._torch_private.watched import (
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

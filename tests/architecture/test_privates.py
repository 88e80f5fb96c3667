"""What PyTorch keeps to itself and Kedge uses all the same: each is there, and does what it is used for."""

from __future__ import annotations

import functools
import gc
import sys
from types import SimpleNamespace

import torch
from torch.autograd import _get_sequence_nr
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode
from torch.utils import checkpoint

from kedge.torch_internals.checkpoint import owners_around
from kedge.torch_internals.module_calls import CALLS
from kedge.torch_internals.own_functions import own_function


def test_a_backward_pass_has_a_number():
    """Recomputes and backward passes are told apart by the number of the graph task; -1 stands for none."""
    seen = []
    x = torch.ones(2, requires_grad=True)
    (y := x * 2).register_hook(lambda g: seen.append(torch._C._current_graph_task_id()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()

    assert torch._C._current_graph_task_id() == -1
    assert -1 not in seen
    assert len(set(seen)) == 2


def test_a_checkpoint_keeps_one_object_from_its_forward_to_its_recompute():
    """A non-reentrant checkpoint's frame is in the closure of the saved-tensor hooks in force."""
    inside = []

    def block(x):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        inside.extend(type(cell.cell_contents) for cell in hooks[0].__closure__ or ())
        return x.sin().cos()

    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    checkpoint.checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert checkpoint._CheckpointFrame in inside


def test_a_reentrant_checkpoint_names_its_context():
    """The frames of a reentrant checkpoint's two passes hold one context, under the name that Kedge looks for."""
    assert "ctx" in checkpoint.CheckpointFunction.forward.__code__.co_varnames
    assert "ctx" in checkpoint.CheckpointFunction.backward.__code__.co_varnames


def test_the_forward_of_a_function_of_ones_own_is_known_by_its_code_and_runs_without_grad():
    """Whether PyTorch calls it through a frame of its own or not, and whatever decorates it."""
    seen = []

    def noting(forward):
        @functools.wraps(forward)
        def noted(*args):
            return forward(*args)

        return noted

    class Same(torch.autograd.Function):
        @staticmethod
        @noting
        def forward(ctx, x):
            seen.append((own_function(sys._getframe().f_code), torch.is_grad_enabled()))
            return x.clone()

    Same.apply(torch.ones(2, requires_grad=True))
    assert seen == [("Same", False)]
    assert own_function(checkpoint.CheckpointFunction.forward.__code__) == ""


def test_a_function_of_ones_own_is_known_also_when_another_was_freed():
    """As many classes as before are not the same ones."""
    gc.collect()

    class One(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

    assert own_function(One.forward.__code__) == "One"
    del One
    gc.collect()

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    assert own_function(Two.forward.__code__) == "Two"


def test_tensors_count_changes_and_share_storages():
    """A tensor's version counter and its storage's identity are those of every alias."""
    x = torch.zeros(4)
    alias = x.detach()
    x.add_(1)

    assert alias._version == x._version == 1
    assert alias.untyped_storage()._cdata == x[1:].untyped_storage()._cdata


def test_autograd_numbers_its_operations():
    """An operation's number is one less than that of the next."""
    y = torch.ones(2, requires_grad=True) * 2

    assert y.grad_fn._sequence_nr() == _get_sequence_nr() - 1


def test_norms_of_many_tensors_come_from_one_call():
    """The multi-tensor norm gives one number a tensor, in the dtype that is asked for."""
    norms = torch._foreach_norm(
        [torch.ones(4), torch.ones(9, dtype=torch.bfloat16)], dtype=torch.float32
    )

    assert [n.item() for n in norms] == [2, 3]
    assert {n.dtype for n in norms} == {torch.float32}


def test_dynamo_tells_whether_it_has_compiled_and_can_be_kept_out(compiled):
    """Dynamo counts its frames, and functions can be marked as not for it."""
    from torch._dynamo import config, convert_frame

    torch.compiler.reset()
    assert convert_frame.FRAME_COUNTER == 0
    compiled(lambda x: x + 1, backend="eager")(torch.ones(2))

    assert convert_frame.FRAME_COUNTER > 0
    assert config.skip_nnmodule_hook_guards is True
    assert callable(torch._C._dynamo.eval_frame.set_code_exec_strategy)


def test_dynamo_tells_its_seconds_and_keeps_the_settings_of_compiling_again(compiled):
    """It adds up the time of compiling, and knows what forbids a second time and what limits it."""
    from torch._dynamo import config, eval_frame

    from kedge.torch_internals import dynamo

    before = dynamo.compile_seconds()
    compiled(lambda x: x + 1, backend="eager")(torch.ones(2))

    assert 0 < dynamo.compile_seconds() - before < 60
    assert config.recompile_limit < config.accumulated_recompile_limit
    assert eval_frame._stance.stance == "default"
    assert dynamo.may_compile_again()
    for name in ("error_on_recompile", "enable_compiler_collectives"):
        with config.patch({name: True}):
            assert not dynamo.may_compile_again()
    with torch.compiler.set_stance("eager_on_recompile"):
        assert not dynamo.may_compile_again()


def test_dynamo_translates_the_stance_and_returns_its_entries(compiled):
    """Right before compiled code runs, by one function; an entry tells whether it is for a frame."""
    from torch._dynamo import eval_frame

    def twice(x):
        return x * 2

    compiled(twice, backend="eager")(torch.ones(2))
    (entry,) = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(twice.__code__)

    assert entry.guard_manager.check({"x": torch.ones(2)})
    assert not entry.guard_manager.check({"x": torch.ones(2, 2)})
    assert eval_frame._callback_from_stance(None) is None
    with torch.compiler.set_stance("fail_on_recompile"):
        assert eval_frame._callback_from_stance(print)._torchdynamo_orig_backend is print
    with torch.compiler.set_stance("eager_on_recompile"):
        assert eval_frame._callback_from_stance(print) is False


def test_operators_can_have_an_effect():
    """The operators of compiled code are registered as having an ordered effect."""
    from torch._higher_order_ops.effects import _get_effect

    import kedge.hooks.gates.compiled  # noqa: F401 - defines them

    assert all(
        _get_effect(getattr(torch.ops.kedge, n).default) is not None
        for n in ("value", "gradient", "begin")
    )


def test_the_engine_takes_a_callback_for_the_end_of_a_backward():
    """A share whose last part never comes is completed at the end of the backward pass."""
    ended = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(
        lambda g: torch.autograd.Variable._execution_engine.queue_callback(lambda: ended.append(1))
    )
    y.sum().backward()
    gc.collect()

    assert ended == [1]


def test_an_optimizer_that_was_made_leaves_a_mark_on_its_class():
    """Whether a program has made an optimizer is seen by the `step` of a class."""

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    assert not getattr(Own.step, "hooked", False)
    Own([torch.nn.Parameter(torch.zeros(1))], 0.1)
    assert Own.step.hooked


def test_hooks_stand_in_tables_from_which_they_can_be_taken():
    """A hook that is taken out of its table does not fire, and fires again when it is put back."""
    module, param, fired = torch.nn.Identity(), torch.nn.Parameter(torch.ones(1)), []
    module.register_forward_hook(lambda *_: fired.append("out"))
    param.register_hook(lambda _: fired.append("grad"))

    def run():
        fired.clear()
        module(param * 2).backward()
        return list(fired)

    assert run() == ["out", "grad"]
    kept = [(table, dict(table)) for table in (module._forward_hooks, param._backward_hooks)]
    for table, _ in kept:
        table.clear()
    assert run() == []
    for table, hooks in kept:
        table.update(hooks)
    assert run() == ["out", "grad"]


def test_one_frame_calls_a_modules_hooks_and_its_forward():
    """The frame from which a forward-pre hook is called is the one from which the forward is called."""
    frames = {}
    module = torch.nn.Identity()
    module.forward = lambda x: frames.setdefault("forward", sys._getframe(1)) and x
    module.register_forward_pre_hook(
        lambda *_: frames.setdefault("hook", sys._getframe(1)) and None
    )
    module(torch.ones(1))

    assert frames["hook"] is frames["forward"]
    assert id(frames["hook"].f_code) in CALLS


def test_a_checkpoint_keeps_the_function_that_it_will_run_again():
    """What stands in a checkpoint's frame or context while its forward runs is what its recompute calls."""
    for reentrant in (False, True):
        ran = []

        def block(x, reentrant=reentrant, ran=ran):
            here = SimpleNamespace(graded=True)
            if not ran:
                (owner, kind, again), *outer = owners_around(here)
                assert (kind, again, outer) == (reentrant, False, [])
                name = "run_function" if reentrant else "recompute_fn"
                run = getattr(owner, name)
                setattr(owner, name, lambda *args: (ran.append("again"), run(*args))[1])
            ran.append("block")
            return x.sin().cos()

        checkpoint.checkpoint(
            block, torch.ones(2, requires_grad=True), use_reentrant=reentrant
        ).sum().backward()
        assert ran == ["block", "again", "block"]
    assert issubclass(checkpoint._StopRecomputationError, Exception)


def test_a_generator_begins_and_ends_a_checkpoint():
    """It saves the tensors given to it, and its frame has what Kedge reads and replaces."""
    ran = []
    begun = checkpoint._checkpoint_without_reentrant_generator(
        lambda x: ran.append(x.sin().cos()),
        True,
        checkpoint.noop_context_fn,
        "default",
        False,
        True,
        torch.ones(2, requires_grad=True),
    )
    x = torch.ones(2, requires_grad=True)
    next(begun)
    frame = begun.gi_frame.f_locals["new_frame"]
    y = x.sin().cos()
    assert next(begun, "over") == "over"

    assert frame.early_stop is True
    assert callable(frame.metadata_fn)
    for name in ("get_inputs", "check_recomputed_tensors_match"):
        assert callable(getattr(type(frame), name))
    seen = []
    frame.get_inputs = lambda: seen.append("inputs") or type(frame).get_inputs(frame)
    y.sum().backward()
    assert seen == ["inputs"]
    assert not ran  # it stopped as soon as all was recomputed


def test_modes_stand_on_a_stack_of_their_thread():
    """A function mode is pushed, sees what is called, and is popped as the object that it is."""
    mode = BaseTorchFunctionMode()
    torch._C._push_on_torch_function_stack(mode)

    assert torch._C._len_torch_function_stack() == 1
    assert torch._C._pop_torch_function_stack() is mode


def test_dynamo_lists_the_code_it_has_compiled(compiled):
    """A function's compiled code can be counted."""

    def double(x):
        return x * 2

    listed = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    assert not listed(double.__code__)
    compiled(double, backend="eager")(torch.ones(2))
    assert len(listed(double.__code__)) == 1


def test_attention_asks_for_modes_by_a_name_of_its_module():
    """Attention's function and forward ask for function modes under the names that Kedge gives another answer to."""
    names = functional.multi_head_attention_forward.__code__.co_names
    assert {"has_torch_function", "handle_torch_function"} <= {*names}
    assert {"torch", "F", "_native_multi_head_attention"} <= {
        *torch.nn.MultiheadAttention.forward.__code__.co_names
    }

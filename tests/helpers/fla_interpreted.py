"""The kernels of flash-linear-attention through our arguments, run by Triton's interpreter, against
the recurrence in float64: prints {form: [error of outputs, of states behind, of gradients]} as
shares of the largest number, and which forms took shared heads as they are.

The package is changed in two places, from outside: its autotuner takes the first configuration
(there is nothing to time), and numbers of a loop in a kernel know `.to`, which the interpreter
leaves Python's own.
"""

import builtins
import json
import sys

import recurrences
import torch
from triton.runtime import autotuner

from megatron_burst.linear_attention import forms
from megatron_burst.linear_attention.kernels import fla
from megatron_burst.linear_attention.kernels.base import LinearInputs, RankPieces

# A piece that goes on elsewhere, and one that ends.
CUT = RankPieces((70, 30), (True, False))
SCALE = 0.3
made = autotuner.Autotuner.__init__


def first_configuration(self, fn, arg_names, configs, *others, **more):
    made(self, fn, arg_names, list(configs)[:1], *others, **more)


class Index(int):
    def to(self, dtype):
        return self


def numbers(*bounds):
    return map(Index, builtins.range(*map(int, bounds)))


def errors(form, dtype=torch.float16):
    loaded = fla.function(forms.FORMS[form])
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops."):
            vars(module)["range"] = numbers
    exact = recurrences.case(form, sum(CUT.lengths), b=1, g=1, h=2, d=32, w=32)
    mine = recurrences.leaves(
        recurrences.Case(*(None if x is None else x.to(dtype) for x in exact))
    )
    true = recurrences.leaves(recurrences.Case(*(None if x is None else x.double() for x in mine)))
    starts, other = (torch.randn(2, 1, 2, 32, 32, generator=torch.manual_seed(i)) for i in (3, 4))
    entering, entering_too = starts.clone().requires_grad_(), starts.double().requires_grad_()
    run = fla.run(loaded, forms.FORMS[form], LinearInputs(*mine, SCALE), CUT)
    out, behind = run.outputs(entering), recurrences.applied(run.maps, other)[:1]
    out_too, _ = recurrences.pieces(true, CUT.lengths, entering_too, SCALE)
    behind_too = recurrences.pieces(true, CUT.lengths, other.double(), SCALE)[1][:1]
    got = recurrences.gradients((out.double(), behind.double()), (*mine, entering))
    wanted = recurrences.gradients((out_too, behind_too), (*true, entering_too))
    pairs = [[(out, out_too)], [(behind, behind_too)], list(zip(got, wanted, strict=True))]
    return [max(map(error, each)) for each in pairs]


def error(pair):
    found, wanted = pair
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


if __name__ == "__main__":
    autotuner.Autotuner.__init__ = first_configuration
    found = {form: errors(form) for form in sys.argv[1:] or recurrences.SHAPES}
    shared = [f for f in found if fla.shares_heads(forms.FORMS[f], fla.function(forms.FORMS[f]))]
    print(json.dumps({"errors": found, "shared": shared}))

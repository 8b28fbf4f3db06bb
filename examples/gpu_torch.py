# SPDX-License-Identifier: Apache-2.0
import torch
import waybill.torch as wbt

config = wbt.MoeConfig(H=64, F=128, router=wbt.RouterConfig(E=8, K=2, aux_coefficient=1e-2), recipe="bf16", T_max=256)
block = wbt.MoE(config, device="cuda", dtype=torch.bfloat16)
x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

def step():
    return torch.autograd.grad(block(x).float().square().mean(), [x, *block.parameters()])

stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    step()  # the first call allocates; it cannot be captured
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    gradients = step()
graph.replay()
torch.cuda.synchronize()
print([tuple(gradient.shape) for gradient in gradients], bool(gradients[1].abs().max() > 0))
# -> [(256, 64), (8, 64), (8, 256, 64), (8, 64, 128)] True

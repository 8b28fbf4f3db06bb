# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
import waybill.torch as wbt

dist.init_process_group("gloo")
rank, P = dist.get_rank(), dist.get_world_size()
ep = wbt.process_group_fabric()  # or of a smaller group: the expert-parallel one
config = wbt.MoeConfig(H=32, F=64, router=wbt.RouterConfig(E=8, K=2, aux_coefficient=1e-2))

torch.manual_seed(0)  # the same everywhere: gate and shared experts are replicated
block = wbt.MoE(config, ep=ep)  # holds experts [block.first_expert, block.first_expert + E / P)
torch.manual_seed(100 + rank)  # experts and data of one's own
torch.nn.init.normal_(block.experts.gate_up_proj, std=0.1)
torch.nn.init.normal_(block.experts.down_proj, std=0.1)
optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)

first = last = None
for step in range(20):
    x = torch.randn(64 + rank, 32)  # ranks may bring different numbers of tokens
    loss = (block(x) - x.roll(1, dims=-1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    dist.all_reduce(block.gate.weight.grad)  # a replicated parameter: the sum of each rank's part
    block.gate.weight.grad /= P
    for parameter in block.experts.parameters():  # whole already; the mean over ranks' losses divides by P
        parameter.grad /= P
    optimizer.step()
    last = float(loss.detach())
    first = last if first is None else first
print(f"rank {rank}: learns {last < first}, experts {block.first_expert} to {block.first_expert + block.num_local_experts - 1}", flush=True)
dist.barrier()
dist.destroy_process_group()

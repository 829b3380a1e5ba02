from test_fused_tensor_parallel import *
import test_fused_tensor_parallel as t
del test_fused_tensor_parallel

def ep():
    family = MIXTURE
    for before in (True, False):
        one = made(family)
        model = loaded(one, "grouped_mm", ep_size=dist.get_world_size(), tp_size=dist.get_world_size(), tp_plan="auto")
        print(type(model.model.layers[0].mlp.experts).__name__, model.model.layers[0].mlp.experts._is_expert_parallel, vars(model.model.layers[0].mlp.experts).get("forward"))
        loss_of(model)(**batch(0, 1)).backward(); model.zero_grad()
        r = fuse(model); print(r.counts(), [x.reason for x in r.left])
        with ranks.Traffic() as traffic:
            model(**batch(0, 1)).logits
        print({n: traffic.ops[n] for n in family.ops})
        compare(trained(model), trained(one))
test_tmp = ranks.tests({2: [loaded_with_a_plan_of_transformers, ep]}, 300, PRELOADED)

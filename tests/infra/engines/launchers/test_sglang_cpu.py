"""The launcher's arithmetic, in SGLang's own environment."""

from shared import in_sglang

from infra.settings import CHECKOUT

PROGRAM = """
import runpy, sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
runpy.run_path(sys.argv[1], run_name="launcher")["multiply_rows_alike"]()
rows, matrix, bias = torch.randn(40, 128), torch.randn(128, 96), torch.randn(96)
nan = lambda count: torch.full((count, 96), float("nan"))
products = {
    "mm": lambda x: x @ matrix,
    "linear": lambda x: torch.nn.functional.linear(x, matrix.T, bias),
    "addmm_": lambda x: nan(len(x)).addmm_(x, matrix, beta=0, alpha=2.0),
}
with torch.inference_mode():
    for name, product in products.items():
        whole = product(rows)
        right = (rows.double() @ matrix.double()) * (2 if name == "addmm_" else 1) + (bias if name == "linear" else 0)
        torch.testing.assert_close(whole.double(), right, atol=1e-4, rtol=1e-4)
        sizes = [count for count in range(1, 41) if not torch.equal(product(rows[:count]), whole[:count])]
        print(name, sizes)
"""


def test_a_row_s_product_does_not_depend_on_how_many_rows_there_are() -> None:
    output = in_sglang(PROGRAM, CHECKOUT / "infra/engines/launchers/sglang_cpu.py")
    assert output.split("\n")[:3] == ["mm []", "linear []", "addmm_ []"]

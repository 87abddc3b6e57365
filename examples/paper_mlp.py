"""The MLP table of arXiv 2604.24013 from two of its figures, by simulating the schedules that calls run.

python examples/paper_mlp.py
"""

from __future__ import annotations

from flashoverlap.cluster.paper import Setting, reproduce


def main() -> None:
    found = reproduce(Setting(communication_s=43.8e-3, hidden_reduction=0.369))
    print(f"in:  {found.setting}")
    print(f"out: a link of {found.machine.link.bytes_per_s / 1e9:.1f} GB/s; {found.slices} slices explain 84 %")
    print(f"{'mode':8} {'exposed ms':>10} {'latency ms':>10} {'hidden':>7} {'reduced':>7}")
    for row in found.rows:
        print(
            f"{row.mode:8} {row.communication_ms:10.2f} {row.latency_ms:10.1f} "
            f"{row.communication_reduction:7.1%} {row.latency_reduction:7.1%}"
        )
    for seq, rows in found.trend.items():
        print(f"sequence {seq:6}: " + ", ".join(f"{row.mode} {row.latency_reduction:.1%}" for row in rows[1:]))


if __name__ == "__main__":
    main()

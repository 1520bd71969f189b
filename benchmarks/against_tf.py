"""Is training with replicax as fast as with tf_mirrored? See `against_peers`; this one needs the benchmark environment."""

from benchmarks.against_peers import main

if __name__ == "__main__":
    main(peers="tf_mirrored")

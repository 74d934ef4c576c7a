# Runs a command and drops its output on all ranks but the first, unless it fails.
rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-0}}}
[ "$rank" = 0 ] && exec "$@"
output=$("$@" 2>&1) || { code=$?; printf '%s\n' "rank $rank:" "$output" | tail -n 40; exit $code; }

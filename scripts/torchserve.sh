#!/usr/bin/env bash
# Serves a run by TorchServe, on this machine alone (127.0.0.1) and behind a key.
#
#     bash scripts/torchserve.sh run=<run directory> [input=<file>]           archives, starts, predicts, stops
#     bash scripts/torchserve.sh start run=<run directory> [port=<number>]    port 0, the default, is a free one
#     bash scripts/torchserve.sh predict run=<run directory> [input=<file>]   a PNG, JPEG, .npy, .json or .bin; a blank sample without it
#     bash scripts/torchserve.sh stop run=<run directory>
#
# A run without an archive is exported first; target.<key>=<value> and checkpoint=<which> go to scripts/export.py and
# export it again.
# It needs Java 17 and: pip install torchserve torch-model-archiver pyyaml. While it runs, <run directory>/torchserve
# holds its configuration, its keys, readable by their owner alone, and its logs. TorchServe's maintainers no longer
# maintain it: for anything that others can reach, scripts/serve.py is the better choice.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=$(command -v python || command -v python3 || true)
SECONDS_TO_START=120
patience=120 # seconds that an answer is waited for

fail() {
    echo "$1" >&2
    exit 1
}

verb=all run="" input="" port=0 overrides=()
for word in "$@"; do
    case $word in
    start | predict | stop | all) verb=$word ;;
    run=*) run=${word#run=} ;;
    input=*) input=${word#input=} ;;
    port=*) port=${word#port=} ;;
    target.*=* | checkpoint=*) overrides+=("$word") ;;
    *) fail "$word is unknown: bash scripts/torchserve.sh [start|predict|stop] run=<run directory> [input=<file>] [port=<number>] [target.<key>=<value>]" ;;
    esac
done
[[ -n $run ]] || fail "run is missing: give a run directory, such as run=logs/latest."
[[ -f $run/config.yaml ]] || fail "run=$run is no run directory: it has no config.yaml."
[[ -z $input || -f $input ]] || fail "input=$input: there is no such file."
if [[ ! $port =~ ^[0-9]{1,5}$ ]] || ((10#$port > 65535)); then
    fail "port=$port: give a number from 1 to 65535, or 0 for a free one."
fi
run=$(cd -P "$run" && pwd)
folder=$run/exports/torchserve
state=$run/torchserve
[[ -n $PYTHON ]] || fail "python is not found: activate Lathe's environment first."
command -v curl >/dev/null || fail "curl is not found, which requests are sent with: install it (Debian: apt-get install curl)."

# Ids of the processes that this script started for the run: those of TorchServe in the process group that it noted.
processes() {
    [[ -f $state/group ]] || return 0
    "$PYTHON" - "$(<"$state/group")" <<'CODE'
import os, sys, psutil

for process in psutil.process_iter():
    try:
        line = " ".join(process.cmdline())
        if os.getpgid(process.pid) == int(sys.argv[1]) and any(
            name in line for name in ("ts.model_server", "org.pytorch.serve.ModelServer", "model_service_worker.py")
        ):
            print(process.pid)
    except (psutil.Error, OSError):
        pass
CODE
}

require_torchserve() {
    local java=java
    [[ -z ${JAVA_HOME:-} ]] || java=$JAVA_HOME/bin/java
    command -v "$java" >/dev/null || fail "Java is not found, which TorchServe runs on: install Java 17 (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME."
    local version
    version=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1)
    ((${version:-0} >= 17)) || fail "Java ${version:-of an unknown version} is too old for TorchServe: install Java 17, or set JAVA_HOME to it."
    # TorchServe does not name pyyaml and numpy itself; without them its workers die over and over while /ping says
    # Healthy
    "$PYTHON" -c "import ts, yaml, numpy, PIL, torch" 2>/dev/null ||
        fail "TorchServe or what it needs is not installed here: pip install torchserve torch-model-archiver pyyaml numpy pillow."
}

archive() {
    if [[ ! -f $folder/manifest.json ]] || ((${#overrides[@]})); then
        (cd "$ROOT" && "$PYTHON" scripts/export.py "run=$run" target=torchserve ${overrides[@]+"${overrides[@]}"}) || exit 1
    fi
    # an archive that was changed since is not started
    "$PYTHON" - "$folder" <<'CODE' || exit 1
import sys

from lathe.errors import UserError
from lathe.export.bundle import read_manifest

try:
    read_manifest(sys.argv[1])
except UserError as error:
    sys.exit(str(error))
CODE
    echo "archive: $folder/model.mar"
}

# A file with zeros as the run's net takes them.
blank() {
    "$PYTHON" - "$folder/manifest.json" "$state" <<'CODE'
import json, pathlib, sys

import numpy as np

facts = json.loads(pathlib.Path(sys.argv[1]).read_text())["input"]
if facts["layout"] == "NT":
    pathlib.Path(sys.argv[2], "blank.json").write_text('{"tokens": [0]}')
else:
    sides = [side if isinstance(side, int) else 8 for side in facts["shape"][1:]]
    np.save(pathlib.Path(sys.argv[2], "blank.npy"), np.zeros(sides, np.uint8))
CODE
}

# Sends a file, writes what comes back to $state/answer and prints the status; "000" for none. The key is read from a
# file, since words of a command can be read by others on the machine.
send() {
    local file=$1 type=()
    shift
    case $file in
    *.json) type=(-H "Content-Type: application/json") ;;
    *.bin) type=(-H "Content-Type: application/octet-stream") ;;
    esac
    : >"$state/answer"
    curl --silent --noproxy '*' --max-time "$patience" --output "$state/answer" --write-out '%{http_code}' ${type[@]+"${type[@]}"} "$@" \
        --upload-file "$file" "$(<"$state/address")" || true
}

start() {
    if [[ -d $state ]]; then
        [[ -z $(processes) ]] || fail "TorchServe already serves this run at $(<"$state/address"): bash scripts/torchserve.sh stop run=$run"
        clear_state
    fi
    require_torchserve
    archive
    mkdir -m 700 "$state" || fail "run=$run: another start is under way there, or the directory can't be written to."
    stop_at_exit
    # Its sockets and unpacked archives. A socket's path has about 100 characters at most
    local base=${TMPDIR:-/tmp}
    ((${#base} <= 60)) || base=/tmp
    local scratch
    scratch=$(mktemp -d "$base/lathe-ts.XXXXXX")
    echo "$scratch" >"$state/scratch"
    local ports
    ports=$("$PYTHON" - "$port" <<'CODE'
import socket, sys

found = [socket.socket() for _ in range(5)]
try:
    for index, one in enumerate(found):
        one.bind(("127.0.0.1", int(sys.argv[1]) if index == 0 else 0))
except OSError as error:
    sys.exit(f"port={sys.argv[1]} can't be used ({error.strerror}): give another, or 0 for a free one.")
print(*(one.getsockname()[1] for one in found))
CODE
    ) || exit 1
    read -r -a ports <<<"$ports"
    echo "http://127.0.0.1:${ports[0]}/predictions/model" >"$state/address"
    cat >"$state/config.properties" <<PROPERTIES
inference_address=http://127.0.0.1:${ports[0]}
management_address=http://127.0.0.1:${ports[1]}
metrics_address=http://127.0.0.1:${ports[2]}
grpc_inference_address=127.0.0.1
grpc_management_address=127.0.0.1
grpc_inference_port=${ports[3]}
grpc_management_port=${ports[4]}
model_store=$folder
load_models=model=model.mar
number_of_gpu=0
max_request_size=16777216
decode_input_request=false
enable_metrics_api=false
disable_system_metrics=true
disable_token_authorization=false
enable_envvars_config=false
PROPERTIES
    # one log that keeps to 40 MB; its own configuration writes six, and a line or more for each request and each metric
    cat >"$state/log4j2.xml" <<LOGGING
<Configuration>
  <Appenders>
    <RollingFile name="file" fileName="$state/server.log" filePattern="$state/server.%i.log">
      <PatternLayout pattern="%d{ISO8601} [%-5p] %t %c - %m%n"/>
      <SizeBasedTriggeringPolicy size="10 MB"/>
      <DefaultRolloverStrategy max="3"/>
    </RollingFile>
  </Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="off"/>
    <Logger name="TS_METRICS" level="off"/>
    <Logger name="MODEL_METRICS" level="off"/>
    <Logger name="io.netty" level="error"/>
    <Root level="info"><AppenderRef ref="file"/></Root>
  </Loggers>
</Configuration>
LOGGING
    # a process group of its own, so that stopping reaches all of it, and nothing else
    set -m
    (
        trap '' HUP
        cd "$state"
        unset TS_CONFIG_FILE
        export TMPDIR=$scratch TEMP=$scratch
        exec "$PYTHON" -m ts.model_server --start --foreground --no-config-snapshots --ts-config config.properties --log-config log4j2.xml
    ) >"$state/output.log" 2>&1 </dev/null &
    echo "$!" >"$state/group"
    set +m
    blank
    # /ping says Healthy while workers die over and over: only an answer counts
    local status="" reason="" deaths=0 began=$SECONDS patience=5 # a worker that can't load its archive never answers
    while ((SECONDS - began < SECONDS_TO_START)); do
        kill -0 "$(<"$state/group")" 2>/dev/null || broken "TorchServe ended before it answered, see the lines above."
        if [[ -s $state/key_file.json ]]; then
            save_key
            status=$(send "$state"/blank.* -H "@$state/key_header")
            [[ $status != 200 ]] || break
        fi
        if [[ -f $state/server.log ]]; then
            reason=$(sed -n 's/.*Failed to load model model, exception //p' "$state/server.log" | tail -n 1)
            [[ -z $reason ]] || fail "TorchServe can't load the archive: $reason"
            # three, since a worker may die by chance, and is started again
            deaths=$(grep -c "Retry worker" "$state/server.log" || true)
            ((deaths < 3)) || broken "TorchServe's workers die, see the lines above."
        fi
        sleep 0.3
    done
    [[ $status == 200 ]] || broken "TorchServe gave no answer within $SECONDS_TO_START seconds, see the lines above."
    trap - EXIT HUP INT TERM
    echo "started: $(<"$state/address"), keys in $state/key_file.json"
}

save_key() {
    (umask 077 && "$PYTHON" -c 'import json, sys; print("Authorization: Bearer " + json.load(open(sys.argv[1]))["inference"]["key"])' \
        "$state/key_file.json" >"$state/key_header" 2>/dev/null) || true
}

# Ends with what the logs say of errors, each once, and a sentence.
broken() {
    sed -n -E 's/^.* MODEL_LOG - ([A-Za-z.]*(Error|Exception).*)/\1/p; /^[A-Za-z.]*(Error|Exception)/p' \
        "$state/server.log" "$state/output.log" 2>/dev/null | sort -u | tail -n 5 >&2 || true
    fail "$1"
}

predict() {
    [[ -n $(processes) ]] || fail "TorchServe does not serve this run: bash scripts/torchserve.sh start run=$run"
    local file=$input status
    [[ -n $file ]] || { file=$(echo "$state"/blank.*) && echo "a blank sample; input=<file> sends your own:"; }
    save_key # which may have been renewed
    status=$(send "$file" -H "@$state/key_header")
    cat "$state/answer"
    echo
    [[ $status == 200 ]] || fail "the request was answered with status $status."
}

without_key() {
    local status
    status=$(send "$state"/blank.*)
    [[ $status == 400 || $status == 401 || $status == 403 ]] || fail "a request without the key was answered with status $status: it should have been refused."
    echo "without the key: refused, status $status"
}

stop_at_exit() {
    trap 'stop >/dev/null' EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

clear_state() {
    [[ ! -s $state/scratch ]] || rm -rf "$(<"$state/scratch")"
    rm -rf "$state"
}

stop() {
    [[ -d $state ]] || fail "TorchServe does not serve this run: there is nothing to stop."
    local left scratch=""
    left=$(processes)
    if [[ -n $left ]]; then
        [[ ! -s $state/scratch ]] || scratch=$(<"$state/scratch")
        (cd "$state" && TMPDIR=$scratch "$PYTHON" -m ts.model_server --stop) >/dev/null 2>&1 || true
        for _ in {1..60}; do
            left=$(processes)
            [[ -n $left ]] || break
            sleep 0.3
        done
        # shellcheck disable=SC2086  # ids, one a word
        [[ -z $left ]] || kill -KILL $left 2>/dev/null || true
    fi
    clear_state
    echo "stopped"
}

case $verb in
start) start ;;
predict) predict ;;
stop) stop ;;
all)
    start
    stop_at_exit
    predict
    without_key
    trap - EXIT HUP INT TERM
    stop
    ;;
esac

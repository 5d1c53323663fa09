// E2B's JavaScript SDK: what its readme and its users do with a sandbox. Prints nothing, and fails where an answer is wrong.

import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { createRequire } from 'node:module'

// An `import` would not look for the packages in NODE_PATH.
const { Sandbox, CommandExitError } = createRequire(import.meta.url)('@e2b/code-interpreter')

const mark = randomUUID()
const sandbox = await Sandbox.create({ timeoutMs: 120_000, metadata: { mark }, envs: { SET: 'at create' } })
try {
  assert.ok(await sandbox.isRunning())

  const lines = []
  const first = await sandbox.runCode("import os\nx = 20\nprint(os.environ['SET'])\nx + 1", {
    onStdout: (message) => lines.push(message.line),
  })
  assert.equal(first.text, '21')
  assert.deepEqual(lines.join(''), 'at create\n')
  assert.equal((await sandbox.runCode('x * 2')).text, '40')
  const failed = await sandbox.runCode('1 / 0')
  assert.equal(failed.error?.name, 'ZeroDivisionError')
  assert.match(failed.error.traceback, /ZeroDivisionError/)

  assert.equal((await sandbox.commands.run('echo $GREETING', { envs: { GREETING: 'hello' } })).stdout, 'hello\n')
  await assert.rejects(sandbox.commands.run('echo gone >&2; exit 3'), (error) => {
    assert.ok(error instanceof CommandExitError)
    assert.deepEqual([error.exitCode, error.stderr], [3, 'gone\n'])
    return true
  })
  const running = await sandbox.commands.run('sleep 60', { background: true })
  assert.ok((await sandbox.commands.list()).some((process) => process.pid === running.pid))
  assert.ok(await sandbox.commands.kill(running.pid))

  await sandbox.files.makeDir('work')
  const seen = new Set()
  const both = Promise.withResolvers?.() ?? deferred()
  const watch = await sandbox.files.watchDir('work', (event) => {
    seen.add(event.name)
    if (seen.has('täxt.txt') && seen.has('bytes')) both.resolve()
  })
  await sandbox.files.write('work/täxt.txt', 'Grüße\n')
  assert.equal(await sandbox.files.read('work/täxt.txt'), 'Grüße\n')
  const bytes = Uint8Array.from({ length: 256 }, (_, index) => index)
  await sandbox.files.write('work/bytes', bytes.buffer)
  assert.deepEqual(new Uint8Array(await sandbox.files.read('work/bytes', { format: 'bytes' })), bytes)
  assert.deepEqual((await sandbox.files.list('work')).map((entry) => entry.name).sort(), ['bytes', 'täxt.txt'])
  await both.promise
  await watch.stop()
  await sandbox.files.remove('work')
  assert.equal(await sandbox.files.exists('work'), false)

  const before = (await sandbox.getInfo()).endAt
  await sandbox.setTimeout(600_000)
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.deepEqual(info.metadata, { mark })
  assert.ok(info.endAt > before)
  assert.equal((await (await Sandbox.connect(sandbox.sandboxId)).runCode('x')).text, '20')
  const listed = await Sandbox.list({ query: { metadata: { mark } } }).nextItems()
  assert.deepEqual(listed.map((each) => each.sandboxId), [sandbox.sandboxId])
  assert.ok(sandbox.getHost(3000).startsWith(`3000-${sandbox.sandboxId}.`))
} finally {
  await sandbox.kill()
}
assert.equal(await sandbox.isRunning(), false)

function deferred() {
  let resolve
  const promise = new Promise((done) => (resolve = done))
  return { promise, resolve }
}

// Drives an agent with the unmodified SDK of E2B, which in its debug mode speaks to
// http://localhost:49983 without any control plane. Argument: a scratch directory.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
const { Sandbox, CommandExitError, NotFoundError, FileNotFoundError, InvalidArgumentError, TimeoutError, FileType } =
  createRequire(process.cwd() + '/')('e2b')

const dir = process.argv[2]
const sbx = await Sandbox.create()
const step = async (name, f) => {
  try { await f() } catch (e) { console.log('FAIL ' + name); console.log(e); process.exitCode = 1; return }
  console.log('ok ' + name)
}
const until = async (f) => { for (let i = 0; i < 3000; i++) { if (await f()) return; await new Promise(r => setTimeout(r, 10)) } throw new Error('timed out') }

await step('run', async () => {
  const r = await sbx.commands.run('echo out; echo err >&2; echo $X; pwd', { envs: { X: 'y' }, cwd: dir })
  assert.equal(r.exitCode, 0); assert.equal(r.stdout, 'out\ny\n' + dir + '\n'); assert.equal(r.stderr, 'err\n')
})
await step('exit code', () => assert.rejects(sbx.commands.run('echo x; exit 3'), e => e instanceof CommandExitError && e.exitCode === 3 && e.stdout === 'x\n' && e.message === 'exit status 3'))
await step('killed by a signal', () => assert.rejects(sbx.commands.run('kill -9 $$'), e => e instanceof CommandExitError && e.exitCode === -1))
await step('missing directory', () => assert.rejects(sbx.commands.run('true', { cwd: '/no/such' }), InvalidArgumentError))
await step('timeout kills', async () => {
  await assert.rejects(sbx.commands.run(`echo $$ > ${dir}/pid; sleep 1000`, { timeoutMs: 4000 }), TimeoutError)
  const pid = (await sbx.files.read(dir + '/pid')).trim()
  await until(async () => (await sbx.commands.run(`kill -0 ${pid} 2>/dev/null && echo alive || true`)).stdout === '')
})
await step('ten megabytes', async () => {
  let n = 0
  await sbx.commands.run('head -c 10000000 /dev/zero | tr "\\0" x', { onStdout: s => { n += s.length } })
  assert.equal(n, 10000000)
})
await step('many at once', async () => {
  const rs = await Promise.all(Array.from({ length: 30 }, (_, i) => sbx.commands.run('echo ' + i)))
  assert.deepEqual(rs.map(r => r.stdout.trim()), Array.from({ length: 30 }, (_, i) => String(i)))
})
await step('background, input, list, kill', async () => {
  const h = await sbx.commands.run('cat', { background: true, stdin: true })
  assert.ok((await sbx.commands.list()).some(p => p.pid === h.pid && p.cmd === '/bin/bash'))
  await sbx.commands.sendStdin(h.pid, 'hello\n')
  await until(() => h.stdout === 'hello\n')
  const again = await sbx.commands.connect(h.pid)
  await sbx.commands.sendStdin(h.pid, 'more\n')
  await until(() => again.stdout === 'more\n')
  assert.equal(await h.kill(), true)
  await assert.rejects(again.wait(), CommandExitError)
  assert.equal(await sbx.commands.kill(h.pid), false)
  await assert.rejects(sbx.commands.connect(4194305), NotFoundError)
})
await step('close input', async () => {
  const h = await sbx.commands.run('cat', { background: true, stdin: true })
  await sbx.commands.sendStdin(h.pid, 'last')
  if (!sbx.commands.closeStdin) { await h.kill(); return }
  await sbx.commands.closeStdin(h.pid)
  assert.equal((await h.wait()).stdout, 'last')
})
await step('terminal', async () => {
  let text = ''
  const t = await sbx.pty.create({ cols: 90, rows: 20, cwd: dir, onData: d => { text += Buffer.from(d).toString() } })
  await sbx.pty.sendInput(t.pid, Buffer.from('stty size; echo $TERM\n'))
  await until(() => text.includes('20 90') && text.includes('xterm-256color'))
  await sbx.pty.resize(t.pid, { cols: 100, rows: 30 })
  await sbx.pty.sendInput(t.pid, Buffer.from('stty size\n'))
  await until(() => text.includes('30 100'))
  await sbx.pty.sendInput(t.pid, Buffer.from('echo sta""rted; sleep 1000\n'))
  await until(() => text.includes('started'))
  await until(async () => { // keys typed around a ^C may be dropped with it, as on any terminal
    await sbx.pty.sendInput(t.pid, Buffer.from([3]))
    await sbx.pty.sendInput(t.pid, Buffer.from('echo ba""ck\n'))
    await new Promise(r => setTimeout(r, 200))
    return text.includes('back')
  })
  await sbx.pty.sendInput(t.pid, Buffer.from('exit 4\n'))
  await assert.rejects(t.wait(), e => e instanceof CommandExitError && e.exitCode === 4)
})
await step('files', async () => {
  const f = await sbx.files.write(dir + '/a/b.txt', 'content ü')
  assert.equal(f.path, dir + '/a/b.txt')
  assert.equal(await sbx.files.read(dir + '/a/b.txt'), 'content ü')
  const bytes = new Uint8Array([0, 255, 1]); await sbx.files.write(dir + '/bin', new Blob([bytes]))
  assert.deepEqual(await sbx.files.read(dir + '/bin', { format: 'bytes' }), bytes)
  await sbx.files.write(dir + '/empty', ''); assert.equal(await sbx.files.read(dir + '/empty'), '')
  const many = await sbx.files.write([{ path: dir + '/m1', data: '1' }, { path: dir + '/m2', data: '2' }])
  assert.deepEqual(many.map(m => m.name), ['m1', 'm2'])
  const big = 'x'.repeat(5 << 20); await sbx.files.write(dir + '/big', big); assert.equal(await sbx.files.read(dir + '/big'), big)
  await assert.rejects(sbx.files.read(dir + '/nothing'), e => e instanceof (FileNotFoundError ?? NotFoundError) || e instanceof NotFoundError)
  await assert.rejects(sbx.files.read(dir), InvalidArgumentError)
})
await step('gzip and metadata', async () => {
  await sbx.files.write(dir + '/gz', 'packed', { gzip: true, useOctetStream: true, metadata: { author: 'me' } })
  assert.equal(await sbx.files.read(dir + '/gz', { gzip: true }), 'packed')
  const i = await sbx.files.getInfo(dir + '/gz'); if (i.metadata) assert.equal(i.metadata.author, 'me')
})
await step('directories', async () => {
  assert.equal(await sbx.files.makeDir(dir + '/d/e'), true); assert.equal(await sbx.files.makeDir(dir + '/d/e'), false)
  const l = await sbx.files.list(dir + '/a'); assert.deepEqual(l.map(e => [e.name, e.type, e.size]), [['b.txt', FileType.FILE, 10]])
  const i = await sbx.files.getInfo(dir + '/a/b.txt'); assert.equal(i.permissions, '-rw-r--r--'); assert.equal(i.mode, 0o644)
  assert.equal((await sbx.files.rename(dir + '/a/b.txt', dir + '/z/c.txt')).path, dir + '/z/c.txt')
  assert.equal(await sbx.files.exists(dir + '/a/b.txt'), false); assert.equal(await sbx.files.exists(dir + '/z/c.txt'), true)
  await sbx.files.remove(dir + '/z'); await sbx.files.remove(dir + '/z'); assert.equal(await sbx.files.exists(dir + '/z'), false)
})
await step('watch', async () => {
  const seen = []
  const w = await sbx.files.watchDir(dir, e => { seen.push(e.type + ' ' + e.name) }, { recursive: true })
  await sbx.files.makeDir(dir + '/w/x'); await sbx.files.write(dir + '/w/x/f', '1')
  await until(() => seen.includes('write w/x/f')); assert.ok(seen.includes('create w') && seen.includes('create w/x'))
  await w.stop()
})
await step('is running', async () => assert.equal(await sbx.isRunning(), true))
process.exit()

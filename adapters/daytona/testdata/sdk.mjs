// Drives the fake of Daytona with the unmodified SDK of the vendor, by the calls that the adapter makes. Arguments: the API's URL and
// a key.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
const { Daytona, DaytonaConflictError, DaytonaNotFoundError, DaytonaAuthenticationError, Image } = createRequire(process.cwd() + '/')('@daytonaio/sdk')

const [apiUrl, apiKey] = process.argv.slice(2)
const connect = key => new Daytona({ apiKey: key, apiUrl, target: 'local', useDeprecatedPolling: true })
const daytona = connect(apiKey)
const step = async (name, f) => {
  try { await f() } catch (e) { console.log('FAIL ' + name); console.log(e); process.exitCode = 1; return }
  console.log('ok ' + name)
}
const until = async (f) => { for (let i = 0; i < 3000; i++) { if (await f()) return; await new Promise(r => setTimeout(r, 10)) } throw new Error('timed out') }
const params = name => ({ name, labels: { owner: 'sdk', name }, autoStopInterval: 60, autoDeleteInterval: 0, ttlMinutes: 60, networkBlockAll: true })

let box
await step('create', async () => {
  box = await daytona.create(params('one'), { timeout: 120 })
  assert.equal(box.state, 'started'); assert.equal(box.name, 'one'); assert.equal(box.networkBlockAll, true)
})
if (!box) process.exit(1)
await step('a name is taken once', () => assert.rejects(daytona.create(params('one')), DaytonaConflictError))
await step('a key that is refused', () => assert.rejects(connect('another').get('one'), DaytonaAuthenticationError))
await step('get by ID and name', async () => {
  for (const ref of [box.id, 'one']) assert.equal((await daytona.get(ref)).id, box.id)
  await assert.rejects(daytona.get('none'), DaytonaNotFoundError)
})
await step('lifetime', async () => {
  assert.equal(box.autoStopInterval, 60); assert.equal(box.autoDeleteInterval, 0)
  await box.setTtl(90)
  await box.setAutostopInterval(0)
  await box.refreshData()
  const left = (new Date(box.autoDestroyAt) - Date.now()) / 60000
  assert.ok(left > 88 && left <= 90, 'destroyed in ' + left); assert.equal(box.autoStopInterval, 0)
})
await step('a command has one output, and a code', async () => {
  const r = await box.process.executeCommand('/bin/sh -c \'echo out; echo err >&2; echo "$1"; exit 3\' \'sh\' \'a b\'')
  assert.equal(r.exitCode, 3); assert.equal(r.result, 'out\nerr\na b\n')
})
await step('a session', async () => {
  await box.process.createSession('s')
  const done = await box.process.executeSessionCommand('s', { command: '(echo out; echo err >&2; exit 4)' })
  assert.equal(done.exitCode, 4); assert.equal(done.stdout, 'out\n'); assert.equal(done.stderr, 'err\n')
  const started = await box.process.executeSessionCommand('s', { command: '(sleep 0.1; exit 5)', runAsync: true })
  await until(async () => (await box.process.getSessionCommand('s', started.cmdId)).exitCode === 5)
})
await step('files', async () => {
  const bytes = Buffer.from(Array.from({ length: 3 << 20 }, (_, i) => i * 7 % 256))
  await box.fs.uploadFile(bytes, '/tmp/.sandboxer/up')
  assert.equal(Buffer.compare(await box.fs.downloadFile('/tmp/.sandboxer/up'), bytes), 0)
  const r = await box.process.executeCommand('wc -c </tmp/.sandboxer/up')
  assert.equal(r.result.trim(), String(bytes.length))
})
await step('a preview needs its token', async () => {
  const p = await box.getPreviewLink(9317)
  assert.equal((await fetch(p.url)).status, 401)
  assert.equal((await fetch(p.url, { headers: { 'x-daytona-preview-token': p.token } })).status, 502)
})
await step('an image that cannot be built', () => assert.rejects(daytona.create({ ...params('broken'), image: Image.base('invalid') }, { timeout: 120 }), /build_failed/))
await step('list by labels, page after page', async () => {
  for (const name of ['two', 'three', 'four']) await daytona.create({ ...params(name), image: 'debian:stable-slim' }, { timeout: 120 })
  const names = []
  for await (const b of daytona.list({ labels: { owner: 'sdk' } })) if (b.state !== 'build_failed') names.push(b.name)
  assert.deepEqual(names.sort(), ['four', 'one', 'three', 'two'])
  const one = []
  for await (const b of daytona.list({ labels: { name: 'two' } })) one.push(b.name)
  assert.deepEqual(one, ['two'])
})
await step('snapshot, restore, delete', async () => {
  await box.process.executeCommand('echo kept >kept')
  await box.createSnapshot('saved', 120)
  await until(async () => (await daytona.snapshot.get('saved')).state === 'active')
  assert.ok((await daytona.snapshot.list()).items.some(s => s.name === 'saved'))
  const again = await daytona.create({ ...params('restored'), snapshot: 'saved' }, { timeout: 120 })
  assert.equal((await again.process.executeCommand('cat kept')).result, 'kept\n')
  await daytona.snapshot.delete(await daytona.snapshot.get('saved'))
  await assert.rejects(daytona.snapshot.get('saved'), DaytonaNotFoundError)
})
await step('delete', async () => {
  await box.delete(120, true)
  await until(() => daytona.get('one').then(() => false, e => e instanceof DaytonaNotFoundError))
})

/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * Calls of any engine, as the catalogue describes them: how often, how long, with what in
 * their arguments, and when what they began was done. Nothing in here knows an engine.
 *
 * Everything is added up in the kernel, by (process, call, label, status); a label is a
 * hash of the values that tell calls apart. Records are only written where asked for.
 *
 * The programs are sleepable, so that arguments in pages that are not present are read.
 */
#include "kernel.h"
#include "maps.h"
#include "calls.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define MAX_DEPTH 8
#define MAX_ARRAY 8
#define MAX_TAKEN 64
#define MAX_LENGTHS 8
#define MOVED_UNKNOWN 0xffff
#define ABSENT_NS (~0ULL)
#define ENTRY_ONLY 1
#define STEPPED 2		/* bits of the cookie above its lower half */
#define FREQUENT 8		/* an eighth of what was spent */

struct frame {
	__u64 ts, sp;
	__u64 args[CALL_ARGS];
	__u64 value[CALL_FIELDS];
	__u32 present;
	__u16 call;
	__u8 group, state;
	__u64 around;		/* inside a call of group 0 */
	char text[CALL_TEXT];
};

struct thread {
	struct frame frames[MAX_DEPTH];
	__u32 depth;
	__u32 pad;
};

struct object_key {
	__u64 address;
	__u32 tgid;
	__u32 kind;
};

struct object {
	__u64 subject;
	__u64 value;		/* what the field `other` said when it began; what it holds */
	__u64 since;		/* pending: when the call began */
	__u64 order;		/* pending: number of that call; 0: nothing pends */
	__u64 recording;	/* 1 + calls recorded so far; 0: not recording */
	__u32 fresh;		/* it began while we looked, and had no turn yet */
	__u32 part;		/* pending: the call is done when all of its parts are */
	__u32 yielded;		/* the subject is that of what made it */
	__u32 pad;
	struct call_key key;	/* pending: what it is added to */
};

struct order_key {
	__u64 order;
};

struct counters {
	__u64 value[CALL_ST_COUNT];
};

MAP(ARRAY, confs, MAX_CALLS, __u32, struct call_conf);
MAP(ARRAY, tables, MAX_TABLES, __u32, struct call_table);
MAP(HASH, limits, 4096, struct call_limit_key, struct call_limit);

/* User space makes the entries of these two. */
MAP(HASH, accounts, 4096, struct call_limit_key, struct call_account);
MAP(HASH, families, 16384, struct call_family_key, struct call_family);
MAP(HASH, threads, 512, __u32 /* tid */, struct thread);
MAP(LRU_HASH, objects, 16384, struct object_key, struct object);

/* Calls whose completion was not seen yet: each is done once, however many objects tell. */
MAP(LRU_HASH, orders, 4096, struct order_key, __u32);

/* What a subject holds, whatever address it goes by. */
MAP(LRU_HASH, held, 4096, __u64 /* subject */, __u64);
MAP(HASH, sums, 4096, struct call_key, struct call_sum);
RINGBUF(records, 256 << 10);
MAP(PERCPU_ARRAY, stats, 1, __u32, struct counters);
MAP(ARRAY, numbers, 1, __u32, __u64);
MAP(ARRAY, blank, 1, __u32, struct thread);	/* stays zero: the initial value of an entry */
MAP(ARRAY, zero_sum, 1, __u32, struct call_sum);	/* stays zero, too */

const struct call_record *btf_call_record __attribute__((unused)) = 0;
const enum call_use btf_call_use __attribute__((unused)) = 0;
const enum call_source btf_call_source __attribute__((unused)) = 0;
const enum call_when btf_call_when __attribute__((unused)) = 0;
const enum call_field_flag btf_call_field_flag __attribute__((unused)) = 0;
const enum call_ok btf_call_ok __attribute__((unused)) = 0;
const enum call_has btf_call_has __attribute__((unused)) = 0;
const enum call_state btf_call_state __attribute__((unused)) = 0;
const enum call_stat btf_call_stat __attribute__((unused)) = 0;
const enum call_limit_flag btf_call_limit_flag __attribute__((unused)) = 0;

static __always_inline void count(enum call_stat which)
{
	__u32 zero = 0;
	struct counters *c = bpf_map_lookup_elem(&stats, &zero);

	if (c)
		__sync_fetch_and_add(&c->value[which], 1);
}

static __always_inline __u64 new_number(void)
{
	__u32 zero = 0;
	__u64 *last = bpf_map_lookup_elem(&numbers, &zero);

	return last ? __sync_fetch_and_add(last, 1) + 1 : 1;
}

static __always_inline __u64 mix(__u64 h, __u64 v)
{
	h = (h ^ v) * 0x9e3779b97f4a7c15ULL;
	return h ^ (h >> 29);
}

static __always_inline long read_user(void *to, __u32 size, __u64 from)
{
	if (!bpf_probe_read_user(to, size, (void *)from))
		return 0;
	return bpf_copy_from_user(to, size, (void *)from);
}

static __always_inline struct frame *frame_at(struct thread *t, __u32 depth)
{
	return depth >= 1 && depth <= MAX_DEPTH ? &t->frames[depth - 1] : 0;
}

/* ---- reading one field ----------------------------------------------------------------- */

struct reading {
	struct frame *f;
	const struct call_conf *c;
	__u64 result;		/* what the function returned */
	__u64 now;
	__u32 when;
	__u32 tgid;
	__u32 failed;
	__u32 last;		/* bit per sum: the last value counts */
	__u64 sum[CALL_SUMS];
	__u64 order;		/* of this call, where something pends on it */
	struct call_key key;
};

static __always_inline __u64 source_of(struct reading *r, const struct call_field *d, bool *there)
{
	__u64 value = 0;

	if (d->source == CS_RETURN)
		return r->result;
	if (d->source == CS_AROUND)
		return r->f->around;
	if (d->source == CS_STACK) {
		if (read_user(&value, 8, r->f->sp + d->stack))
			*there = false;
		return value;
	}
	return r->f->args[d->source & (CALL_ARGS - 1)];
}

/* Whether the structure at `p` says that it has `end` bytes at least. */
static __always_inline bool long_enough(__u64 p, __u64 end)
{
	__u64 size = 0;

	return !read_user(&size, 8, p) && size >= end;
}

static __always_inline bool follow(struct reading *r, const struct call_field *d, __u64 *value)
{
	bool there = true;
	__u64 p = source_of(r, d, &there);
	__u32 i;

	if (!there)
		return false;
	for (i = 0; i < CALL_STEPS; i++) {
		bool last = i + 1 >= d->steps;
		/* Linux 6.1's verifier forgets the bounds of what was put on the stack before they
		 * were checked; a masked value keeps its own, so `next` has room for all of them. */
		__u32 width = last ? d->size & 15 : 8;
		__u64 next[2] = {};

		if (i >= d->steps)
			break;
		if (!p || width > 8)
			return false;
		if ((d->flags & CF_SIZED || (d->flags & CF_SIZED_FIRST && !i)) &&
		    !long_enough(p, (__u64)d->step[i] + width))
			return false;
		if (last && d->flags & CF_INLINE) {
			p += d->step[i];
			break;
		}
		if (read_user(next, width, p + d->step[i]))
			return false;
		p = next[0];
	}
	p >>= d->shift & 63;
	if (d->size == 4)
		p = d->flags & CF_SIGNED ? (__u64)(__s64)(__s32)p : (__u32)p;
	else if (d->size == 2)
		p = (__u16)p;
	else if (d->size == 1)
		p = (__u8)p;
	*value = p;
	return true;
}

static __always_inline bool value_of(struct frame *f, __u8 other, __u64 *value)
{
	__u32 i = other - 1;

	if (i >= CALL_FIELDS || !(f->present & 1u << i))
		return false;
	*value = f->value[i];
	return true;
}

static __always_inline bool read_text(struct frame *f, const struct call_field *d, __u64 from)
{
	__u64 length = 0;
	char c;

	if (!from)
		return false;
	if (d->other) {
		if (!value_of(f, d->other, &length) || !length)
			return false;
		if (length > CALL_TEXT - 1)
			length = CALL_TEXT - 1;
		return !bpf_copy_from_user(f->text, length & (CALL_TEXT - 1), (void *)from);
	}
	if (bpf_probe_read_user_str(f->text, sizeof(f->text), (void *)from) > 0)
		return true;
	/* Its page may only have to be brought in. */
	return !bpf_copy_from_user(&c, 1, (void *)from) &&
	       bpf_probe_read_user_str(f->text, sizeof(f->text), (void *)from) > 0;
}

static __always_inline bool product_of(struct reading *r, const struct call_field *d, __u64 *value)
{
	__u64 lengths[MAX_LENGTHS] = {}, n = 0, by = 0, product = 1;
	struct call_table *t;
	__u32 i, table = d->table - 1;

	if (d->source != CS_STACK && d->stack)
		n = d->stack;
	else if (!value_of(r->f, d->other, &n))
		return false;
	if (n > MAX_LENGTHS)
		return false;
	if (n && read_user(lengths, (n * 8) & 127, *value))
		return false;
	for (i = 0; i < MAX_LENGTHS; i++)
		if (i < n)
			product *= lengths[i];
	if (d->table) {
		t = bpf_map_lookup_elem(&tables, &table);
		if (!t || !value_of(r->f, d->scale, &by) || by >= TABLE_VALUES || !t->bits[by])
			return false;
		product = (product * t->bits[by] + 7) / 8;
	}
	*value = product;
	return true;
}

/* ---- what a field does ------------------------------------------------------------------ */

/* The call that `o` waited for is done now. */
static __always_inline void done(struct object *o, __u64 now)
{
	struct order_key order = { .order = o->order };
	struct call_key key = o->key;
	struct call_sum *s;
	__u64 since = o->since;

	__u32 *left;

	if (!o->order)
		return;
	o->order = 0;
	left = bpf_map_lookup_elem(&orders, &order);
	if (!left)
		return;		/* another object has told so already */
	if (o->part && __sync_fetch_and_add(left, -1) > 1)
		return;		/* other devices are at it */
	if (bpf_map_delete_elem(&orders, &order))
		return;
	s = bpf_map_lookup_elem(&sums, &key);
	if (s && now > since) {
		__sync_fetch_and_add(&s->done, 1);
		__sync_fetch_and_add(&s->done_ns, now - since);
	}
}

static __always_inline void begin_object(struct object_key *key, __u64 subject, __u64 value)
{
	struct object fresh = {};

	fresh.subject = subject;
	fresh.value = value;
	bpf_map_update_elem(&objects, key, &fresh, BPF_ANY);
}

struct taking {
	__u64 array, total;
	__u64 n;
	__u32 tgid, kind;
};

static long take_one(__u32 i, struct taking *t)
{
	struct object_key key = { .tgid = t->tgid, .kind = t->kind };
	struct object *o;

	if (i >= t->n || read_user(&key.address, 8, t->array + 8 * i))
		return 1;
	o = bpf_map_lookup_elem(&objects, &key);
	if (o && o->value) {
		t->total += o->value;
		o->value = 0;
	}
	return 0;
}

static __always_inline void act(struct reading *r, const struct call_field *d, __u32 i, __u64 value)
{
	struct object_key key = { .address = value, .tgid = r->tgid, .kind = d->kind };
	struct object_key its = { .tgid = r->tgid, .kind = d->slot };
	struct frame *f = r->f;
	struct object *o, *from;
	__u64 other = 0, seen = value;

	if (d->use & CU_BIND) {
		value_of(f, d->other, &other);
		seen = new_number();
		begin_object(&key, seen, other);
		o = bpf_map_lookup_elem(&objects, &key);
		if (o)
			o->fresh = 1;
	}
	if (d->use & CU_ALIAS && value_of(f, d->other, &its.address)) {
		/* `slot` is the kind of the object in the other field, which holds its address. */
		from = bpf_map_lookup_elem(&objects, &its);
		if (!from) {
			begin_object(&its, new_number(), 0);
			from = bpf_map_lookup_elem(&objects, &its);
		}
		if (from) {
			struct object same = *from;

			same.recording = 0;
			seen = same.subject;
			bpf_map_update_elem(&objects, &key, &same, BPF_ANY);
		}
	}
	o = bpf_map_lookup_elem(&objects, &key);
	if (d->use & CU_SUBJECT) {
		if (!o) {
			/* It began before we looked. */
			begin_object(&key, new_number(), 0);
			o = bpf_map_lookup_elem(&objects, &key);
		}
		seen = o ? o->subject : 0;
	}
	if (d->use & CU_FIRST) {
		seen = o ? o->fresh : 0;
		if (o)
			o->fresh = 0;
	}
	if (d->use & CU_SWITCH) {
		/* Who had the last turn is remembered at an address that no object has. */
		struct object_key turn = { .address = ~0ULL, .tgid = r->tgid, .kind = d->kind };

		seen = 0;
		if (o) {
			from = bpf_map_lookup_elem(&objects, &turn);
			if (!from)
				begin_object(&turn, o->subject, 0);
			else if (from->subject != o->subject) {
				from->subject = o->subject;
				seen = 1;
			}
		}
	}
	if (d->use & CU_OWNER) {
		seen = o && o->yielded ? o->subject : 0;
		if (!seen) {
			f->present &= ~(1u << i);
			return;
		}
	}
	if (d->use & CU_OPENS) {
		if (!o) {
			begin_object(&key, 0, 0);
			o = bpf_map_lookup_elem(&objects, &key);
		}
		if (o)
			o->recording = 1;
	}
	if (d->use & CU_WITHIN && o && o->recording && f->state == CK_OUTERMOST) {
		__sync_fetch_and_add(&o->recording, 1);
		f->state = CK_RECORDED;
	}
	if (d->use & CU_CLOSES && o && o->recording && value_of(f, d->other, &its.address)) {
		begin_object(&its, new_number(), o->recording - 1);
		o->recording = 0;
	}
	if (d->use & CU_HOLDS) {
		seen = o ? o->value : 0;
		if (!o) {
			f->present &= ~(1u << i);
			return;
		}
	}
	if (d->use & CU_SETS && o && value_of(f, d->other, &other)) {
		bpf_map_update_elem(&held, &o->subject, &other, BPF_ANY);
		seen = other;
	}
	if (d->use & CU_HELD) {
		__u64 *holds = o ? bpf_map_lookup_elem(&held, &o->subject) : 0;

		seen = holds ? *holds : 0;
		if (!holds) {
			f->present &= ~(1u << i);
			return;
		}
	}
	if (d->use & CU_TAKES) {
		struct taking t = { .array = value, .tgid = r->tgid, .kind = d->kind };

		if (value_of(f, d->other, &t.n))
			bpf_loop(MAX_TAKEN, take_one, &t, 0);
		seen = t.total;
	}
	if (d->use & CU_AWAITS && o)
		done(o, r->now);
	if (d->use & CU_FORGET) {
		seen = o ? o->value : 0;
		if (!o)
			f->present &= ~(1u << i);
		bpf_map_delete_elem(&objects, &key);
	}
	f->value[i] = seen;
}

static long read_field(__u32 i, struct reading *r)
{
	const struct call_field *d;
	struct frame *f = r->f;
	__u64 value = 0;

	if (i >= CALL_FIELDS || i >= r->c->n_fields)
		return 1;
	d = &r->c->fields[i];
	if (d->when != r->when || (r->failed && !(d->flags & CF_ALWAYS)))
		return 0;
	if (d->only_if && (!value_of(f, d->only_if, &value) || !value))
		return 0;
	if (!follow(r, d, &value))
		return 0;
	if (d->use & CU_TEXT && !read_text(f, d, value)) {
		count(CALL_ST_UNREAD);
		return 0;
	}
	if (d->use & CU_PRODUCT && !product_of(r, d, &value)) {
		count(CALL_ST_UNREAD);
		return 0;
	}
	if (d->use & CU_TIMES) {
		__u64 by = 0;

		if (!value_of(f, d->other, &by))
			return 0;
		value *= by;
	}
	f->value[i] = value;
	f->present |= 1u << i;
	if (d->kind && !(d->use & CU_PENDS) && (value || !(d->flags & CF_NONZERO)))
		act(r, d, i, value);
	return 0;
}

/* What pends on this call: one object, or an array of them. */
static __always_inline void pends(struct reading *r, const struct call_field *d, __u64 address, __u32 parts)
{
	struct object_key key = { .address = address, .tgid = r->tgid, .kind = d->kind };
	struct order_key order = {};
	struct object fresh = {}, *o;
	__u64 subject = 0;

	if (!address && d->flags & CF_NONZERO)
		return;
	if (!r->order) {
		r->order = new_number();
		order.order = r->order;
		bpf_map_update_elem(&orders, &order, &parts, BPF_ANY);
	} else if (parts > 1) {
		order.order = r->order;
		bpf_map_update_elem(&orders, &order, &parts, BPF_ANY);
	}
	o = bpf_map_lookup_elem(&objects, &key);
	if (o) {
		fresh.subject = o->subject;
		fresh.value = o->value;
		fresh.recording = o->recording;
		fresh.yielded = o->yielded;
	}
	if (d->scale && value_of(r->f, d->scale, &subject)) {
		fresh.subject = subject;
		fresh.yielded = 1;
	}
	fresh.part = parts > 1;
	fresh.order = r->order;
	fresh.since = r->f->ts;
	fresh.key = r->key;
	bpf_map_update_elem(&objects, &key, &fresh, BPF_ANY);
}

static long pending_field(__u32 i, struct reading *r)
{
	const struct call_field *d;
	__u64 array[MAX_ARRAY] = {}, n = 0;
	__u32 k;

	if (i >= CALL_FIELDS || i >= r->c->n_fields)
		return 1;
	d = &r->c->fields[i];
	if (!(d->use & CU_PENDS) || !(r->f->present & 1u << i))
		return 0;
	if (!d->other) {
		pends(r, d, r->f->value[i], 1);
		return 0;
	}
	if (!r->f->value[i])
		return 0;
	if (!value_of(r->f, d->other, &n)) {
		if (!(d->flags & CF_ELSE_ONE))
			return 0;
		n = 1;
	}
	if (n > MAX_ARRAY)
		n = MAX_ARRAY;
	if (!n || read_user(array, (n * 8) & 127, r->f->value[i]))
		return 0;
	for (k = 0; k < MAX_ARRAY; k++)
		if (k < n)
			pends(r, d, array[k], d->scale ? 1 : n);
	return 0;
}

static long sum_field(__u32 i, struct reading *r)
{
	const struct call_field *d;

	if (i >= CALL_FIELDS || i >= r->c->n_fields)
		return 1;
	d = &r->c->fields[i];
	if (!(r->f->present & 1u << i)) {
		/* A sum that is not known is not 0: such calls are apart from the others. */
		if (d->use & CU_SUM)
			r->key.label = mix(r->key.label + i + 1, ABSENT_NS);
		return 0;
	}
	if (d->use & CU_LABEL && !(d->use & CU_TEXT))
		r->key.label = mix(r->key.label + i + 1, r->f->value[i]);
	if (d->use & CU_SUM && d->slot < CALL_SUMS) {
		r->sum[d->slot] += r->f->value[i];
		if (d->flags & CF_LAST)
			r->last |= 1u << d->slot;
	}
	return 0;
}

/* ---- a call that ended ------------------------------------------------------------------- */

static __always_inline struct call_sum *sum_of(struct reading *r)
{
	struct call_sum *s = bpf_map_lookup_elem(&sums, &r->key), *blank_sum;
	__u32 zero = 0, i;

	if (s)
		return s;
	blank_sum = bpf_map_lookup_elem(&zero_sum, &zero);
	if (!blank_sum)
		return 0;
	if (bpf_map_update_elem(&sums, &r->key, blank_sum, BPF_NOEXIST) == 0) {
		s = bpf_map_lookup_elem(&sums, &r->key);
		if (!s)
			return 0;
		s->present = r->f->present;
		for (i = 0; i < CALL_FIELDS; i++)
			s->value[i] = r->f->value[i];
		if (r->c->has & CH_TEXT)
			__builtin_memcpy(s->text, r->f->text, CALL_TEXT);
		return s;
	}
	s = bpf_map_lookup_elem(&sums, &r->key);	/* another thread was first */
	if (s)
		return s;
	count(CALL_ST_LABELS_FULL);
	r->key.label = 0;
	r->key.status = 0;
	r->key.state = CK_OVERFLOW;
	return bpf_map_lookup_elem(&sums, &r->key);	/* user space has made it */
}

static __always_inline void write_record(struct reading *r, __u64 ns, __u32 depth)
{
	struct call_limit_key key = { .tgid = r->tgid, .set = r->c->set };
	struct call_limit *target = bpf_map_lookup_elem(&limits, &key);
	struct call_record *record;
	__u32 i;

	if (!target || !(target->flags & CT_RECORDS))
		return;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		count(CALL_ST_LOST_RECORDS);
		return;
	}
	record->ts = r->f->ts;
	record->ns = ns;
	record->label = r->key.label;
	for (i = 0; i < CALL_SUMS; i++)
		record->sum[i] = r->sum[i];
	record->tgid = r->tgid;
	record->tid = bpf_get_current_pid_tgid();
	record->status = r->key.status;
	record->call = r->key.call;
	record->state = r->key.state;
	record->depth = depth;
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

static __always_inline void finish(struct reading *r, __s32 status, __u64 ns, __u32 depth)
{
	struct call_sum *s;
	__u32 i;

	r->key.tgid = r->tgid;
	r->key.call = r->f->call;
	r->key.status = status;
	r->key.state = r->f->state;
	if (r->c->n_fields)
		bpf_loop(CALL_FIELDS, sum_field, r, 0);
	for (i = 0; r->c->has & CH_TEXT && i < CALL_TEXT / 8; i++) {
		__u64 word = ((__u64 *)r->f->text)[i];

		if (word)
			r->key.label = mix(r->key.label + i, word);
	}
	s = sum_of(r);
	if (s) {
		__sync_fetch_and_add(&s->count, 1);
		if (ns == ABSENT_NS) {
			__sync_fetch_and_add(&s->untimed, 1);
		} else {
			__sync_fetch_and_add(&s->ns, ns);
			if (ns > s->max_ns)
				s->max_ns = ns;
		}
		for (i = 0; i < CALL_SUMS; i++)
			if (r->last & 1u << i)
				s->sum[i] = r->sum[i];
			else if (r->sum[i])
				__sync_fetch_and_add(&s->sum[i], r->sum[i]);
		if (!r->failed && r->c->has & CH_PENDS)
			bpf_loop(CALL_FIELDS, pending_field, r, 0);
	}
	write_record(r, ns, depth);
}

/* ---- entry and return ---------------------------------------------------------------------- */

static __always_inline void save_args(struct frame *f, struct pt_regs *ctx)
{
#if defined(__TARGET_ARCH_x86)
	f->args[0] = ctx->di;
	f->args[1] = ctx->si;
	f->args[2] = ctx->dx;
	f->args[3] = ctx->cx;
	f->args[4] = ctx->r8;
	f->args[5] = ctx->r9;
	f->args[6] = f->args[7] = 0;
#else
	__u32 i;

	for (i = 0; i < CALL_ARGS; i++)
		f->args[i] = ctx->regs[i];
#endif
}

static __always_inline __u64 entry_sp(struct pt_regs *ctx, __u64 cookie)
{
	__u64 moved = (cookie >> 16) & 0xffff;

	return REG_SP(ctx) + (moved == MOVED_UNKNOWN ? 0 : moved);
}

/* Frames that lie below a function that is entered were left without a return; one at its very
 * place, too, unless it ended by jumping here (`tail`) and returns with it. */
static __always_inline void drop_left(struct thread *t, __u64 sp, bool tail)
{
	struct frame *f;
	__u32 i;

	for (i = 0; i < MAX_DEPTH; i++) {
		f = frame_at(t, t->depth);
		if (!f || f->sp > sp || (f->sp == sp && tail))
			break;
		count(CALL_ST_UNRETURNED);
		t->depth--;
	}
}

static __always_inline struct call_family *family_of(const struct call_conf *c, __u32 tgid)
{
	struct call_family_key key = { .tgid = tgid, .family = c->family };

	return bpf_map_lookup_elem(&families, &key);
}

/* Whether this hit is paid for; it is charged either way. Over the limit the frequent calls go first:
 * what made up less than an eighth of all that was spent so far goes on for as much again. Where
 * everything happens inside or between calls of group 0, whole rounds of them are watched or none. */
static __noinline bool paid_for(const struct call_conf *c, __u32 tgid, __u64 cookie)
{
	struct call_limit_key key = { .tgid = tgid, .set = c->set };
	struct call_limit *limit = bpf_map_lookup_elem(&limits, &key);
	struct call_account *a;
	struct call_family *f;
	__u64 now, since, cost;
	__u32 stepped = cookie >> 32 & STEPPED ? 1 : 0;
	bool open;

	if (!limit)
		return false;	/* not a process that is watched */
	a = bpf_map_lookup_elem(&accounts, &key);
	f = family_of(c, tgid);
	if (!a || !f)
		return false;
	open = a->spent_ns < limit->limit_ns;
	if (limit->flags & CT_WHOLE && !c->group) {
		a->live = open;
		a->turns = 1;
	} else if (limit->flags & CT_WHOLE && a->turns) {
		open = a->live && a->spent_ns < limit->hard_ns;
	} else if (!open) {
		open = a->spent_ns < limit->hard_ns && f->spent_ns * FREQUENT < a->spent_ns;
	}
	if (open)
		cost = stepped ? limit->price_ns[1] : limit->price_ns[0];
	else
		cost = stepped ? limit->price_ns[3] : limit->price_ns[2];
	__sync_fetch_and_add(&a->spent_ns, cost);
	__sync_fetch_and_add(&f->spent_ns, cost);
	if (open) {
		__sync_fetch_and_add(&f->hits, 1);
		/* Of several threads that find it open again, one adds the time. */
		since = f->closed_at ? __sync_lock_test_and_set(&f->closed_at, 0) : 0;
		now = since ? bpf_ktime_get_ns() : 0;
		if (now > since)
			__sync_fetch_and_add(&f->unwatched_ns, now - since);
		count(CALL_ST_HITS);
	} else {
		__sync_fetch_and_add(&f->skipped, 1);
		if (!f->closed_at)
			f->closed_at = bpf_ktime_get_ns();
	}
	return open;
}

/* Whether its return is wanted. `c` is the call's, and it was paid for. */
static __always_inline bool on_entered(struct pt_regs *ctx, __u64 cookie, const struct call_conf *c, bool tail)
{
	__u64 id = bpf_get_current_pid_tgid();
	__u32 tid = id, tgid = id >> 32, call = cookie & 0xffff, zero = 0, i;
	__u64 sp = entry_sp(ctx, cookie);
	struct reading r = {};
	struct thread *t, *fresh;
	struct frame *f, *g;

	r.c = c;
	t = bpf_map_lookup_elem(&threads, &tid);
	if (!t) {
		fresh = bpf_map_lookup_elem(&blank, &zero);
		if (!fresh || bpf_map_update_elem(&threads, &tid, fresh, BPF_ANY)) {
			count(CALL_ST_THREADS_FULL);
			return false;
		}
		t = bpf_map_lookup_elem(&threads, &tid);
		if (!t)
			return false;
	}
	drop_left(t, sp, tail);
	f = frame_at(t, t->depth + 1);
	if (!f) {
		count(CALL_ST_TOO_DEEP);
		return false;
	}
	f->ts = bpf_ktime_get_ns();
	f->sp = sp;
	f->call = call;
	f->group = r.c->group;
	f->present = 0;
	f->state = CK_OUTERMOST;
	f->around = 0;
	if (r.c->has & CH_TEXT)
		__builtin_memset(f->text, 0, sizeof(f->text));
	for (i = 1; i < MAX_DEPTH; i++) {
		g = frame_at(t, i);
		if (i > t->depth || !g)
			break;
		if (g->group == f->group)
			f->state = CK_INNER;
		if (!g->group)
			f->around = 1;
	}
	save_args(f, ctx);
	r.f = f;
	r.tgid = tgid;
	r.now = f->ts;
	r.when = CW_ENTRY;
	if (r.c->has & CH_ENTRY)
		bpf_loop(CALL_FIELDS, read_field, &r, 0);
	if (cookie >> 32 & ENTRY_ONLY) {
		finish(&r, 0, ABSENT_NS, t->depth);
		return false;
	}
	t->depth++;
	return true;
}

static __always_inline bool is_failure(const struct call_conf *c, __u64 result, __s32 *status)
{
	__s64 value = c->ok_width == 4 ? (__s64)(__s32)result : (__s64)result;

	*status = 0;
	if (c->ok == CO_ZERO)
		*status = value;
	else if (c->ok == CO_NULL)
		*status = value != 0;
	else if (c->ok == CO_NONNULL)
		*status = value == 0;
	else if (c->ok == CO_NOT_NEGATIVE)
		*status = value < 0 ? value : 0;
	return *status != 0;
}

/* Nothing is lost where entries were not looked at. */
static __noinline void return_without_entry(__u32 call, __u32 tgid)
{
	struct call_conf *c = bpf_map_lookup_elem(&confs, &call);
	struct call_family *f = c ? family_of(c, tgid) : 0;

	if (!f || !f->skipped)
		count(CALL_ST_LOST_RETURN);
}

static __always_inline void on_returned(struct pt_regs *ctx, __u64 cookie)
{
	__u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	__u64 sp = REG_SP(ctx) - RETURN_POPS;
	__u32 tid = id, call = cookie & 0xffff, i;
	struct thread *t = bpf_map_lookup_elem(&threads, &tid);
	struct reading r = {};
	struct frame *f;
	__s32 status;
	__u32 one;

	if (!t)
		return;
	for (i = 0; i < MAX_DEPTH; i++) {
		f = frame_at(t, t->depth);
		if (!f || f->sp >= sp)
			break;
		count(CALL_ST_UNRETURNED);
		t->depth--;
	}
	f = frame_at(t, t->depth);
	if (!f || f->sp != sp || f->call != call) {
		return_without_entry(call, id >> 32);
		return;
	}
	one = call;
	r.c = bpf_map_lookup_elem(&confs, &one);
	if (r.c) {
		r.f = f;
		r.tgid = id >> 32;
		r.now = now;
		r.when = CW_RETURN;
		r.result = REG_RET(ctx);
		r.failed = is_failure(r.c, r.result, &status);
		if (r.c->has & CH_RETURN)
			bpf_loop(CALL_FIELDS, read_field, &r, 0);
		finish(&r, status, now - f->ts, t->depth - 1);
	}
	t->depth--;
}

SEC("uprobe.s")
int on_entry(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 call = cookie & 0xffff;
	struct call_conf *c = bpf_map_lookup_elem(&confs, &call);

	if (c && paid_for(c, bpf_get_current_pid_tgid() >> 32, cookie))
		on_entered(ctx, cookie, c, false);
	return 0;
}

SEC("uprobe.s")
int on_return(struct pt_regs *ctx)
{
	on_returned(ctx, bpf_get_attach_cookie(ctx));
	return 0;
}

/* A thread that ends leaves nothing behind. */
SEC("raw_tp/sched_process_exit")
int on_thread_exit(void *ctx)
{
	__u32 tid = bpf_get_current_pid_tgid();

	bpf_map_delete_elem(&threads, &tid);
	return 0;
}
